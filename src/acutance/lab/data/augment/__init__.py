"""Augmentation on the device, in batches: drawn outside, applied without waiting, compiled if wanted."""

from acutance.lab.data.augment.config import DEIT, DEIT_SMALL_IMAGES, AugmentConfig
from acutance.lab.data.augment.erasing import random_erasing
from acutance.lab.data.augment.mixing import mix, soft_targets
from acutance.lab.data.augment.operations import OPERATIONS, rand_augment
from acutance.lab.data.augment.pipeline import Augment, Draws, normalise
from acutance.lab.data.augment.spatial import flip, random_crop, warp

__all__ = [
    "DEIT",
    "DEIT_SMALL_IMAGES",
    "OPERATIONS",
    "Augment",
    "AugmentConfig",
    "Draws",
    "flip",
    "mix",
    "normalise",
    "rand_augment",
    "random_crop",
    "random_erasing",
    "soft_targets",
    "warp",
]
