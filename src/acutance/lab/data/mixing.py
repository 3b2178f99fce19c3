"""Random erasing, mixup, CutMix, and DeiT's switch between them.

Row 2j of a batch is mixed with row 2j + 1: a batch is a random choice of images, and a pair stays within one process.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.errors import ShapeError

SMALLEST, LARGEST = 0.02, 1 / 3  # of the area
FLATTEST = 0.3  # height over width, down to this and up to its inverse
ATTEMPTS = 10
MASK = 0xFFFFFFFF  # 32 bits
GOLDEN = 0x9E3779B9 - 2**32  # any number that sets two uses of a hash apart; the golden ratio's bits


def erase_boxes(place: Tensor, probability: float, height: int, width: int) -> Tensor:
    """Top, bottom, left and right (batch, 4) of the first of ten rectangles that fits; zeros if nothing is erased."""
    size, shape, down, right, whether = place.unbind(1)
    area = (SMALLEST + (LARGEST - SMALLEST) * size) * (height * width)
    aspect = torch.exp((2 * shape - 1) * math.log(1 / FLATTEST))
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
    top, left = (down[:, 0] * (height - tall + 1)).floor(), (right[:, 0] * (width - wide + 1)).floor()
    erased = fits.any(1) & (whether[:, 0] < probability)
    return (torch.stack([top, top + tall, left, left + wide], 1) * erased[:, None]).long()


def random_erasing(images: Tensor, boxes: Tensor, seeds: Tensor) -> Tensor:
    """Normal noise in each normalised image's rectangle (https://arxiv.org/abs/1708.04896, "pixel" in DeiT's code)."""
    return torch.where(_inside(images, boxes), normal_noise(seeds, images), images)


def normal_noise(seeds: Tensor, like: Tensor) -> Tensor:
    """Normal numbers in the shape of `like`, each row a function of its seed (batch,) alone.

    So rows of a batch get the noise that the whole batch would get there, and no generator is needed on the way.
    """
    places = torch.arange(math.prod(like.shape[1:]), device=like.device, dtype=torch.int32)
    first = _scramble(_scramble(seeds.int())[:, None] ^ places)
    second = _scramble(first ^ GOLDEN)
    radius = (-2 * torch.log(((first.long() & MASK) + 1).to(like.dtype) / (MASK + 2))).sqrt()  # Box and Muller's
    angle = (second.long() & MASK).to(like.dtype) * (2 * math.pi / (MASK + 1))
    return (radius * torch.cos(angle)).view_as(like)


def _scramble(x: Tensor) -> Tensor:
    """A hash of 32 bits (the constants are Wellons'), in int32, which a GPU multiplies in one instruction.

    Products keep the lowest bits; a shift to the right brings in the sign, which is masked.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def mix_plan(place: Tensor, betas: Tensor, config: Any, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """How much of itself each row keeps, whether the rest is a rectangle, and which one (top, bottom, left, right)."""
    choice, *centre = place.unbind(1)
    blended, kept = betas.unbind(1)
    cut = choice < (0.0 if config.cutmix <= 0 else 1.0 if config.mixup <= 0 else config.switch)
    ends = []
    for at, side in zip(centre, (height, width), strict=True):
        long = (side * (1 - kept).sqrt()).floor()
        middle = (at * side).floor()
        ends.append((middle - (long / 2).floor()).clamp(0, side))
        ends.append((middle + ((long + 1) / 2).floor()).clamp(0, side))
    top, bottom, left, right = ends
    area = (bottom - top) * (right - left)  # the border may have cut the rectangle smaller
    return torch.where(cut, 1 - area / (height * width), blended), cut, torch.stack(ends, 1).long()


def mix(images: Tensor, targets: Tensor, keep: Tensor, cut: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours blended (https://arxiv.org/abs/1710.09412) or cut into each other (https://arxiv.org/abs/1905.04899).

    The soft targets (batch, classes) are blended by the same weights `keep` (batch,).
    """
    if len(images) % 2:
        raise ShapeError(f"images are mixed in pairs: a batch, and each share of it, must be even; got {len(images)}")
    others, weight = _partners(images), keep[:, None, None, None]
    pasted = torch.where(_inside(images, boxes), others, images)
    mixed = torch.where(cut[:, None, None, None], pasted, weight * images + (1 - weight) * others)
    return mixed, keep[:, None] * targets + (1 - keep[:, None]) * _partners(targets)


def _inside(images: Tensor, boxes: Tensor) -> Tensor:
    """True within each image's rectangle: (batch, 1, height, width)."""
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    return (((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None])[:, None]


def _partners(rows: Tensor) -> Tensor:
    """Each row's neighbour: 1, 0, 3, 2, …"""
    return rows.reshape(-1, 2, *rows.shape[1:]).flip(1).reshape(rows.shape)


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Labels as distributions (batch, classes): `smoothing` of the weight spread evenly over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
