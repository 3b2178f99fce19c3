"""DeiT-tiny with symmetric attention (queries are keys) on ImageNet, 300 epochs: NeuTRENO's Table 5.

Published (https://arxiv.org/abs/2312.00751): 71.14 % top-1, 90.54 % top-5; with NeuTRENO 72.07 / 91.22. Not measured
here yet.

Needs what `deit_tiny` needs.

Time: not measured, and no bench has this attention; `acutance train` shows images/s and the time left.

    acutance train deit_tiny_symmetric --data-dir /data/imagenet
    acutance train deit_tiny_symmetric --data-dir /data/imagenet --set task.model.mitigation=neutreno:0.6
"""

from __future__ import annotations

from acutance.lab.recipes._deit import deit
from acutance.lab.train.config import Config


def config() -> Config:
    """DeiT's recipe; W_Q is gone, the rest stays."""
    return deit("deit_tiny", attention="symmetric")
