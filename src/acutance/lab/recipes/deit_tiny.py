"""DeiT-tiny/16 on ImageNet, 224×224, 300 epochs: the baseline of NeuTRENO's Table 1.

Published (https://arxiv.org/abs/2312.00751): 72.17 % top-1, 91.02 % top-5; with NeuTRENO 73.01 / 91.56, with FeatScale
72.35 / 91.22, with both 73.23 / 91.73. Not measured here yet.

Needs ImageNet (train/ and val/, a folder per class, or shards) and GPUs: 384 million images go forward and back.

Time: not measured. Divide the images by the images/s of your GPU (`acutance bench --only steps-224`, batch over time of
a step), and by the number of GPUs; decoding may be slower, and `acutance train` shows the time left.

    acutance train deit_tiny --data-dir /data/imagenet
    acutance train deit_tiny --data-dir /data/imagenet --set task.model.mitigation=neutreno:0.6
    torchrun --nproc-per-node 4 -m acutance train deit_tiny --data-dir /data/imagenet
    acutance evaluate runs/deit_tiny-seed0
"""

from __future__ import annotations

from acutance.lab.recipes._deit import deit
from acutance.lab.train.config import Config


def config() -> Config:
    """DeiT's recipe for its smallest model."""
    return deit("deit_tiny")
