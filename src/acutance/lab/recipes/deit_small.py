"""DeiT-small/16 on ImageNet, 224×224, 300 epochs: the baseline of NeuTRENO's Table 7.

Published (https://arxiv.org/abs/2312.00751): 79.97 % top-1, 95.05 % top-5; with NeuTRENO 80.68 / 95.30, with FeatScale
79.96 / 95.06. Not measured here yet.

Needs ImageNet (train/ and val/, a folder per class, or shards) and GPUs: 384 million images go forward and back,
through some four times the parameters of DeiT-tiny.

Time: not measured, and no bench has this size; `acutance train` shows images/s and the time left.

    acutance train deit_small --data-dir /data/imagenet
    acutance train deit_small --data-dir /data/imagenet --set task.model.mitigation=neutreno:0.6
"""

from __future__ import annotations

from acutance.lab.recipes._deit import deit
from acutance.lab.train.config import Config


def config() -> Config:
    """DeiT's recipe for its second model."""
    return deit("deit_small")
