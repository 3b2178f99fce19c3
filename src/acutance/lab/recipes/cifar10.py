"""ViT-Ti/4 on CIFAR-10 at 32×32, from scratch, with the recipe of `cifar100`.

No figure of either paper belongs to it (their CIFAR-10 is `cifar10_kernel`). Not measured here yet.

Needs `cifar-10-batches-py/` and one GPU; 5 million images go forward and back.

Time: not measured; model, images and steps are those of `cifar100`, whose docstring says what they take.

    acutance train cifar10 --data-dir /data --set task.train_on=all
    acutance train cifar10 --data-dir /data --set task.train_on=all --set task.model.mitigation=neutreno:0.6
"""

from __future__ import annotations

from acutance.lab.recipes._small_images import small_images
from acutance.lab.train.config import Config


def config() -> Config:
    """The strong recipe."""
    return small_images("cifar10", num_classes=10)
