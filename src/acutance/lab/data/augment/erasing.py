"""Random erasing: a rectangle of an image becomes noise (https://arxiv.org/abs/1708.04896, "pixel" in DeiT's code)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST, LARGEST = 0.02, 1 / 3  # of the area
FLATTEST = 0.3  # height over width, down to this and up to its inverse
ATTEMPTS = 10
MASK = 0xFFFFFFFF  # 32 bits
GOLDEN = 0x9E3779B9 - 2**32  # any number that sets two uses of a hash apart; the golden ratio's bits


class EraseChance(NamedTuple):
    """Random numbers of erasing."""

    place: Tensor  # (batch, 5, attempts), 0 to 1: area, aspect, top, left, whether at all
    noise: Tensor  # (batch,), 32 bits


class EraseDraws(NamedTuple):
    """The rectangle of each image (all zero where nothing is erased) and the seed of its noise."""

    box: Tensor  # (batch, 4): top, left, height, width
    noise: Tensor  # (batch,), 32 bits


def draw_erasing(count: int, generator: torch.Generator) -> EraseChance:
    """For every image."""
    device = generator.device
    place = torch.rand(5, count, ATTEMPTS, generator=generator, device=device).transpose(0, 1)
    return EraseChance(place, torch.randint(MASK, (count,), generator=generator, device=device))


def read_erasing(chance: EraseChance, probability: float, height: int, width: int) -> EraseDraws:
    """The first of ten rectangles that fits; an image for which none does is left alone."""
    size, shape, down, right, whether = chance.place.unbind(1)
    area = (SMALLEST + (LARGEST - SMALLEST) * size) * (height * width)
    aspect = torch.exp((2 * shape - 1) * math.log(1 / FLATTEST))
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
    top, left = (down[:, 0] * (height - tall + 1)).floor(), (right[:, 0] * (width - wide + 1)).floor()
    erased = fits.any(1) & (whether[:, 0] < probability)
    box = torch.stack([top, left, tall, wide], 1) * erased[:, None]
    return EraseDraws(box.long(), chance.noise)


def random_erasing(images: Tensor, draws: EraseDraws) -> Tensor:
    """Normal noise in each image's rectangle; the images are normalised already."""
    height, width = images.shape[-2:]
    top, left, tall, wide = draws.box[:, :, None].unbind(1)
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    inside = ((rows >= top) & (rows < top + tall))[:, :, None] & ((columns >= left) & (columns < left + wide))[:, None]
    return torch.where(inside[:, None], normal_noise(draws.noise, images), images)


def normal_noise(seeds: Tensor, like: Tensor) -> Tensor:
    """Normal numbers in the shape of `like`, each row a function of its seed alone.

    So a share of a batch gets the noise that the whole batch would get there, and no generator is needed on the way.
    """
    places = torch.arange(math.prod(like.shape[1:]), device=like.device, dtype=torch.int32)
    first = _scramble(_scramble(seeds.int())[:, None] ^ places)
    second = _scramble(first ^ GOLDEN)
    radius = (-2 * torch.log((_unsigned(first) + 1).to(like.dtype) / (MASK + 2))).sqrt()  # Box and Muller's
    angle = _unsigned(second).to(like.dtype) * (2 * math.pi / (MASK + 1))
    return (radius * torch.cos(angle)).view_as(like)


def _scramble(x: Tensor) -> Tensor:
    """A mixing of 32 bits in which each bit of the result hangs on each bit given (the constants are Wellons').

    In int32, a product of which a GPU makes in one instruction. Products keep the lowest bits; a shift to the right
    brings in the sign, which is masked.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _unsigned(x: Tensor) -> Tensor:
    return x.long() & MASK
