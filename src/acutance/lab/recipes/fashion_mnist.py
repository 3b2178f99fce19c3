"""ViT-Ti/4 on Fashion-MNIST at 28×28: a quick real run where CIFAR is not at hand.

No figure of either paper belongs to it. Not measured here yet.

Needs `fashion-mnist/` (the four idx files) and one GPU; 3 million images go forward and back.

Time: not measured; `acutance train` shows images/s and the time left.

    acutance train fashion_mnist --data-dir /data --set task.train_on=all
"""

from __future__ import annotations

from dataclasses import replace

from acutance.lab.data.augment import AugmentConfig
from acutance.lab.recipes._small_images import small_images
from acutance.lab.train.config import Config


def config() -> Config:
    """Milder augmentation than CIFAR's, since colour and most turns mean nothing here, and 50 epochs."""
    strong = small_images("fashion_mnist", num_classes=10, image_size=28, in_chans=1)
    mild = AugmentConfig(crop_pad=2, flip=0.5, erase=0.25, mixup=0.2, smoothing=0.1)
    return replace(
        strong,
        task=replace(strong.task, augment=mild),
        schedule=replace(strong.schedule, warmup=5),
        loop=replace(strong.loop, epochs=50),
    )
