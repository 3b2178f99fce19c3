"""RandAugment with DeiT's operations and magnitudes (https://arxiv.org/abs/1909.13719, rand-m9-mstd0.5-inc1).

Every image of a batch draws its own operations. Each layer is one affine map, one table and one blend for the whole
batch; an image whose operation is of another kind passes through with an identity, exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.lab.data.augment import tables
from acutance.lab.data.augment.spatial import warp

OPERATIONS = (
    "auto_contrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise_add", "colour", "contrast",
    "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
NOTHING = len(OPERATIONS)
HIGHEST = 10.0  # magnitudes run from 0 to 10


class RandChance(NamedTuple):
    """Random numbers of RandAugment, each (batch, layers)."""

    operation: Tensor  # a number in OPERATIONS
    applied: Tensor  # 0 to 1
    noise: Tensor  # normal
    sign: Tensor  # 0 or 1


class RandDraws(NamedTuple):
    """What RandAugment does, each (batch, layers)."""

    operation: Tensor  # a number in OPERATIONS, or NOTHING
    magnitude: Tensor  # 0 to 10
    sign: Tensor  # 1 or −1


def draw_rand_augment(count: int, layers: int, generator: torch.Generator) -> RandChance:
    """For every image and layer."""
    device, shape = generator.device, (count, layers)
    return RandChance(
        torch.randint(len(OPERATIONS), shape, generator=generator, device=device),
        torch.rand(shape, generator=generator, device=device),
        torch.randn(shape, generator=generator, device=device),
        torch.randint(2, shape, generator=generator, device=device),
    )


def read_rand_augment(chance: RandChance, magnitude: float, std: float, probability: float) -> RandDraws:
    """Operations uniform and with replacement, each applied with a probability; magnitudes normal."""
    operation = torch.where(chance.applied < probability, chance.operation, NOTHING)
    return RandDraws(operation, (magnitude + std * chance.noise).clamp(0, HIGHEST), 1.0 - 2.0 * chance.sign)


def rand_augment(images: Tensor, draws: RandDraws, fill: Tensor) -> Tensor:
    """Each image through its operations, one layer after the other.

    Args:
        images: (batch, channels, height, width) floats that hold whole numbers from 0 to 255.
        draws: what each image draws.
        fill: (channels,), the colour that affine maps show from outside; DeiT takes the mean, rounded.
    """
    for layer in range(draws.operation.shape[1]):
        operation, magnitude, sign = (part[:, layer] for part in draws)
        share = magnitude / HIGHEST
        images = warp(images, _matrices(operation, share * sign, images), fill)
        factor = 1 + 0.9 * share * sign
        images = tables.look_up(images, _tables(images, operation, share, factor))
        images = _blend(images, operation, factor)
    return images


def _is(operation: Tensor, name: str) -> Tensor:
    return operation == NUMBER[name]


def _matrices(operation: Tensor, level: Tensor, images: Tensor) -> Tensor:
    """The affine map of each image (batch, 2, 3); up to 30°, a shear of 0.3, a shift of 0.45 of the side."""
    height, width = images.shape[-2:]
    angle = torch.where(_is(operation, "rotate"), -level * math.radians(30), 0.0)
    cosine, sine = angle.cos(), angle.sin()
    shear_x = torch.where(_is(operation, "shear_x"), level * 0.3, 0.0)
    shear_y = torch.where(_is(operation, "shear_y"), level * 0.3, 0.0)
    shift_x = torch.where(_is(operation, "translate_x"), level * (0.45 * width), 0.0)
    shift_y = torch.where(_is(operation, "translate_y"), level * (0.45 * height), 0.0)
    x, y = width / 2, height / 2  # the centre, about which is rotated
    shift_x = shift_x + (1 - cosine) * x - sine * y
    shift_y = shift_y + (1 - cosine) * y + sine * x
    entries = (cosine, sine + shear_x, shift_x, shear_y - sine, cosine, shift_y)
    return torch.stack(entries, 1).view(-1, 2, 3)


def _tables(images: Tensor, operation: Tensor, share: Tensor, factor: Tensor) -> Tensor:
    """The table of each image and channel; the identity where the operation is none of these."""
    choices = {
        "auto_contrast": tables.auto_contrast(images),
        "equalise": tables.equalise(images),
        "invert": tables.invert(images),
        "posterise": tables.posterise(images, 4 - (share * 4).floor()),
        "solarise": tables.solarise(images, 256 - (share * 256).floor()),
        "solarise_add": tables.solarise_add(images, (share * 110).floor()),
        "contrast": tables.contrast(images, factor),
        "brightness": tables.brightness(images, factor),
    }
    table = tables.identity(images).expand(*images.shape[:2], -1)
    for name, choice in choices.items():
        table = torch.where(_is(operation, name)[:, None, None], choice, table)
    return table


def _blend(images: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Colour (a blend with grey) and sharpness (a blend with the smoothed image)."""
    colour, sharpness = _is(operation, "colour"), _is(operation, "sharpness")
    degenerate = torch.where(colour[:, None, None, None], tables.grey(images), tables.smooth(images))
    factor = torch.where(colour | sharpness, factor, 1.0)
    return tables.blend(degenerate, images, factor[:, None, None, None])
