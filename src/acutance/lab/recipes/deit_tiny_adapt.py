"""NeuTRENO put into a trained DeiT-tiny, which is trained on for a third of the epochs: NeuTRENO's Table 1.

Published (https://arxiv.org/abs/2312.00751): 72.63 % top-1, 91.38 % top-5, from a baseline of 72.17 / 91.02. Not
measured here yet. The paper says "one-third number of epochs" and no more; the rate is our choice, a tenth of that of
training from scratch, with the same warm-up and augmentation.

Needs ImageNet, GPUs and the weights of a DeiT-tiny: by default those of `acutance train deit_tiny`, or the published
.pth file. 128 million images go forward and back.

Time: not measured; a third of what `deit_tiny` takes with NeuTRENO.

    acutance train deit_tiny_adapt --data-dir /data/imagenet
    acutance train deit_tiny_adapt --data-dir /data/imagenet --set task.weights=deit_tiny_patch16_224-a1311bcf.pth
"""

from __future__ import annotations

from dataclasses import replace

from acutance.lab.recipes._deit import EPOCHS, TRAINED, deit
from acutance.lab.train.config import Config

SHARE_OF_RATE = 0.1


def config() -> Config:
    """A hundred epochs from trained weights."""
    whole = deit("deit_tiny", mitigation="neutreno:0.6")
    return replace(
        whole,
        task=replace(whole.task, weights=TRAINED),
        optim=replace(whole.optim, lr=SHARE_OF_RATE * whole.optim.lr),
        loop=replace(whole.loop, epochs=EPOCHS / 3),
    )
