"""Which augmentation a recipe uses; everything is off unless asked for."""

from __future__ import annotations

from dataclasses import dataclass

from acutance.errors import AcutanceError


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a batch on the device, in this order. `DEIT` and `DEIT_SMALL_IMAGES` are DeiT's."""

    crop_pad: int = 0  # pixels of black around an image, of which a window of the old size is cut at random
    flip: float = 0.0  # probability of a mirror image
    rand_layers: int = 0  # RandAugment: operations per image
    rand_magnitude: float = 9.0  # of 10
    rand_magnitude_std: float = 0.5
    rand_probability: float = 0.5  # of each operation
    erase: float = 0.0  # probability that a rectangle becomes noise
    mixup: float = 0.0  # α of Beta(α, α); 0 never mixes
    cutmix: float = 0.0  # α of Beta(α, α); 0 never cuts
    switch: float = 0.5  # probability of cutmix where both are on
    smoothing: float = 0.0  # of the labels

    def __post_init__(self) -> None:
        for name in ("flip", "rand_probability", "erase", "switch", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise AcutanceError(f"augment.{name} is a probability or a share: 0 to 1, got {getattr(self, name)}")
        for name in ("crop_pad", "rand_layers", "rand_magnitude_std", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise AcutanceError(f"augment.{name} must not be negative; got {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, so that a batch and its shares must be even."""
        return self.mixup > 0 or self.cutmix > 0


# rand-m9-mstd0.5-inc1 and the rest of https://arxiv.org/abs/2012.12877; the random resized crop is made on decoding.
DEIT = AugmentConfig(flip=0.5, rand_layers=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1)
# Up to 32×32, DeiT's code cuts a window out of the padded image instead.
DEIT_SMALL_IMAGES = AugmentConfig(crop_pad=4, flip=0.5, rand_layers=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1)
