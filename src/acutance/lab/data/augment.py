"""Augmentation of batches on the device. Random numbers are drawn first, so that the rest can be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data.mixing import ATTEMPTS, MASK, erase_boxes, mix, mix_plan, random_erasing, soft_targets
from acutance.lab.data.rand_augment import OPERATIONS, pick, rand_augment, rand_draws


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a batch on the device, in this order. Everything is off unless asked for."""

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
                raise AcutanceError(f"augment.{name} must lie in 0 to 1; got {getattr(self, name)}")
        for name in ("crop_pad", "rand_layers", "rand_magnitude_std", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise AcutanceError(f"augment.{name} must not be negative; got {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, so that each process needs an even number of rows."""
        return self.mixup > 0 or self.cutmix > 0


# rand-m9-mstd0.5-inc1 and the rest of https://arxiv.org/abs/2012.12877; the random resized crop is made on decoding.
DEIT = AugmentConfig(flip=0.5, rand_layers=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1)
# Up to 32×32, DeiT's code cuts a window out of the padded image instead.
DEIT_SMALL_IMAGES = AugmentConfig(crop_pad=4, flip=0.5, rand_layers=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1)


class Draws(NamedTuple):
    """The random numbers of a batch, a row per image; `Augment` turns them into operations and rectangles."""

    crop: Tensor  # (batch, 2): 0 to 2 · crop_pad, down and right
    flip: Tensor  # (batch,): 0 to 1
    operation: Tensor  # (batch, layers): a number in OPERATIONS
    applied: Tensor  # (batch, layers): 0 to 1
    noise: Tensor  # (batch, layers): normal, of the magnitude
    sign: Tensor  # (batch, layers): 0 or 1
    erase: Tensor  # (batch, 5, attempts), 0 to 1: area, aspect, top, left, whether at all
    erase_seed: Tensor  # (batch,): 32 bits
    mix: Tensor  # (batch, 3), 0 to 1: mixup or CutMix, the centre of a rectangle; as in DeiT, one draw for all rows
    keep: Tensor  # (batch, 2): from mixup's and CutMix's Beta

    def rows(self, chosen: slice) -> Draws:
        """The draws of these rows: the same as if the whole batch were augmented, then cut."""
        return Draws(*(part[chosen] for part in self))


class Augment:
    """The augmentation of a configuration; `mean` and `std` are per channel, in units of [0, 1].

    Calls can be compiled with `fullgraph=True`.
    """

    def __init__(
        self,
        config: AugmentConfig,
        *,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.classes = config, classes
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device)
        self.std = torch.tensor(std, dtype=torch.float32, device=device)
        self.fill = (self.mean * 255).round()
        # An α of 0 becomes 1: its draw is not used.
        self._betas = torch.tensor([[config.mixup or 1.0] * 2, [config.cutmix or 1.0] * 2], device=device)

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Draw for a whole global batch, on the generator's device and without waiting for it."""
        to: dict[str, Any] = {"generator": generator, "device": generator.device}
        layers = (count, self.config.rand_layers)
        return Draws(
            torch.randint(2 * self.config.crop_pad + 1, (count, 2), **to),
            torch.rand(count, **to),
            torch.randint(len(OPERATIONS), layers, **to),
            torch.rand(layers, **to),
            torch.randn(layers, **to),
            torch.randint(2, layers, **to),
            torch.rand(5, count, ATTEMPTS, **to).transpose(0, 1),
            torch.randint(MASK, (count,), **to),
            torch.rand(3, **to).expand(count, 3),
            # As torch.distributions.Beta, which takes no generator.
            torch._sample_dirichlet(self._betas, generator)[:, 0].expand(count, 2),
        )

    def __call__(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Bytes (batch, channels, height, width) and labels (batch,) to normalised images and soft targets."""
        config, (height, width) = self.config, images.shape[-2:]
        values = images.float()
        if config.crop_pad:
            values = random_crop(values, config.crop_pad, draws.crop)
        if config.flip:
            values = flip(values, draws.flip < config.flip)
        if config.rand_layers:
            strength = config.rand_magnitude, config.rand_magnitude_std, config.rand_probability
            plan = rand_draws(draws.operation, draws.applied, draws.noise, draws.sign, *strength)
            values = rand_augment(values, plan, self.fill)
        values = self.plain(values)
        if config.erase:
            values = random_erasing(values, erase_boxes(draws.erase, config.erase, height, width), draws.erase_seed)
        targets = soft_targets(labels, self.classes, config.smoothing)
        if not config.mixes:
            return values, targets
        return mix(values, targets, *mix_plan(draws.mix, draws.keep, config, height, width))

    def plain(self, images: Tensor) -> Tensor:
        """Images for evaluation: normalised, and nothing else."""
        return normalise(images.float(), self.mean, self.std)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """From 0…255 to zero mean and unit deviation; `mean` and `std` (channels,) are in units of [0, 1]."""
    return (images / 255 - mean[:, None, None]) / std[:, None, None]


def random_crop(images: Tensor, pad: int, offsets: Tensor) -> Tensor:
    """Windows of the old size out of images with `pad` black pixels around; `offsets` (batch, 2) are down and right."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + offsets[:, :1] - pad
    columns = torch.arange(width, device=images.device) + offsets[:, 1:] - pad
    index = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    return pick(images, index) * inside[:, None].to(images.dtype)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror images, left and right, where `chosen` (batch,) is true."""
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)
