"""All of it in order: what a batch draws, and what is done to it with that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.data.augment.config import AugmentConfig
from acutance.data.augment.erasing import EraseDraws, draw_erasing, random_erasing
from acutance.data.augment.mixing import MixDraws, draw_mixing, mix, soft_targets
from acutance.data.augment.operations import RandDraws, draw_rand_augment, rand_augment
from acutance.data.augment.spatial import flip, random_crop


class Draws(NamedTuple):
    """Everything random about the augmentation of a batch; each tensor has a row per image."""

    crop: Tensor
    flip: Tensor
    rand: RandDraws
    erase: EraseDraws
    mix: MixDraws

    def rows(self, chosen: slice) -> Draws:
        """What these rows of the batch drew: the same as if the whole batch were augmented, then cut."""
        return Draws(
            self.crop[chosen],
            self.flip[chosen],
            RandDraws(*(part[chosen] for part in self.rand)),
            EraseDraws(*(part[chosen] for part in self.erase)),
            MixDraws(*(part[chosen] for part in self.mix)),
        )


def draw(config: AugmentConfig, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
    """Draw for a whole global batch of images of this size, on the generator's device and without waiting for it."""
    device = generator.device
    return Draws(
        torch.randint(2 * config.crop_pad + 1, (count, 2), generator=generator, device=device),
        torch.rand(count, generator=generator, device=device) < config.flip,
        draw_rand_augment(
            count,
            config.rand_layers,
            config.rand_magnitude,
            config.rand_magnitude_std,
            config.rand_probability,
            generator,
        ),
        draw_erasing(count, config.erase, height, width, generator),
        draw_mixing(count, config.mixup, config.cutmix, config.switch, height, width, generator),
    )


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """From 0…255 to zero mean and unit deviation; `mean` and `std` (channels,) are in units of [0, 1]."""
    return (images / 255 - mean[:, None, None]) / std[:, None, None]


class Augment:
    """The augmentation of a configuration, for one data set and device. Calls can be compiled with `fullgraph=True`.

    Args:
        config: what to do.
        classes: how many there are.
        mean: per channel, in units of [0, 1].
        std: per channel.
        device: where the batches are.
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

    def draw(self, count: int, size: tuple[int, int], generator: torch.Generator) -> Draws:
        """Draw for a whole global batch of images of (height, width)."""
        return draw(self.config, count, *size, generator)

    def __call__(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Bytes (batch, channels, height, width) and labels (batch,) to normalised images and soft targets."""
        config = self.config
        values = images.float()
        if config.crop_pad:
            values = random_crop(values, config.crop_pad, draws.crop)
        if config.flip:
            values = flip(values, draws.flip)
        if config.rand_layers:
            values = rand_augment(values, draws.rand, self.fill)
        values = self.plain(values)
        if config.erase:
            values = random_erasing(values, draws.erase)
        targets = soft_targets(labels, self.classes, config.smoothing)
        return mix(values, targets, draws.mix) if config.mixes else (values, targets)

    def plain(self, images: Tensor) -> Tensor:
        """Images for evaluation: normalised, and nothing else."""
        return normalise(images.float(), self.mean, self.std)
