"""All of it in order: what a batch draws, and what is done to it with that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from acutance.lab.data.augment.config import AugmentConfig
from acutance.lab.data.augment.erasing import EraseChance, draw_erasing, random_erasing, read_erasing
from acutance.lab.data.augment.mixing import MixChance, beta_parameters, draw_mixing, mix, read_mixing, soft_targets
from acutance.lab.data.augment.operations import RandChance, draw_rand_augment, rand_augment, read_rand_augment
from acutance.lab.data.augment.spatial import flip, random_crop


class Draws(NamedTuple):
    """Everything random about the augmentation of a batch; each tensor has a row per image.

    These are numbers as a generator gives them, by few calls for a whole batch. What they mean is worked out where they
    are used, in compiled code if the augmentation is.
    """

    crop: Tensor
    flip: Tensor
    rand: RandChance
    erase: EraseChance
    mix: MixChance

    def rows(self, chosen: slice) -> Draws:
        """What these rows of the batch drew: the same as if the whole batch were augmented, then cut."""
        found: Draws = tree_map(lambda part: part[chosen], self)
        return found


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
        self._betas = beta_parameters(config.mixup, config.cutmix, device)

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Draw for a whole global batch, on the generator's device and without waiting for it."""
        device = generator.device
        return Draws(
            torch.randint(2 * self.config.crop_pad + 1, (count, 2), generator=generator, device=device),
            torch.rand(count, generator=generator, device=device),
            draw_rand_augment(count, self.config.rand_layers, generator),
            draw_erasing(count, generator),
            draw_mixing(count, self._betas, generator),
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
            values = rand_augment(values, read_rand_augment(draws.rand, *strength), self.fill)
        values = self.plain(values)
        if config.erase:
            values = random_erasing(values, read_erasing(draws.erase, config.erase, height, width))
        targets = soft_targets(labels, self.classes, config.smoothing)
        if not config.mixes:
            return values, targets
        mixing = read_mixing(draws.mix, config.mixup, config.cutmix, config.switch, height, width)
        return mix(values, targets, mixing)

    def plain(self, images: Tensor) -> Tensor:
        """Images for evaluation: normalised, and nothing else."""
        return normalise(images.float(), self.mean, self.std)
