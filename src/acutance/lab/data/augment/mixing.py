"""Mixup (https://arxiv.org/abs/1710.09412), CutMix (https://arxiv.org/abs/1905.04899), and DeiT's switch between them.

Row 2j of a batch is mixed with row 2j + 1. A batch is a random choice of images, so that neighbours are as good as any
pair, and a pair never crosses from one even share of the batch into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.errors import ShapeError


class MixChance(NamedTuple):
    """Random numbers of mixing; as in DeiT, a batch draws once for all its rows."""

    place: Tensor  # (batch, 3), 0 to 1: mixup or CutMix, the centre of a rectangle
    keep: Tensor  # (batch, 2), from mixup's and CutMix's Beta


class MixDraws(NamedTuple):
    """How much of itself each row keeps."""

    keep: Tensor  # (batch,), the weight of a row's own label
    cut: Tensor  # (batch,), whether the rest comes as a rectangle rather than blended
    box: Tensor  # (batch, 4): top, bottom, left, right, ends not included


def beta_parameters(mixup: float, cutmix: float, device: torch.device | str) -> Tensor:
    """(2, 2), for `draw_mixing`; for an α of 0 another, since its draw is not used."""
    return torch.tensor([[mixup or 1.0] * 2, [cutmix or 1.0] * 2], device=device)


def draw_mixing(count: int, parameters: Tensor, generator: torch.Generator) -> MixChance:
    """Once for `count` images."""
    place = torch.rand(3, generator=generator, device=generator.device)
    keep = torch._sample_dirichlet(parameters, generator)[:, 0]  # as torch.distributions.Beta, which takes no generator
    return MixChance(place.expand(count, 3), keep.expand(count, 2))


def read_mixing(chance: MixChance, mixup: float, cutmix: float, switch: float, height: int, width: int) -> MixDraws:
    """Mixup with Beta(mixup, mixup), CutMix with Beta(cutmix, cutmix); `switch` chooses where both are on."""
    choice, *centre = chance.place.unbind(1)
    blended, kept = chance.keep.unbind(1)
    often = 0.0 if cutmix <= 0 else 1.0 if mixup <= 0 else switch
    cut = choice < often
    box, area = _box(1 - kept, centre, height, width)
    keep = torch.where(cut, 1 - area / (height * width), blended)  # the border may have cut the rectangle smaller
    return MixDraws(keep, cut, box)


def _box(area: Tensor, centre: Sequence[Tensor], height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rectangles with this share of the area about random pixels, cut off at the border; and the pixels in each."""
    ends = []
    for at, side in zip(centre, (height, width), strict=True):
        long = (side * area.sqrt()).floor()
        middle = (at * side).floor()
        ends.append((middle - (long / 2).floor()).clamp(0, side))
        ends.append((middle + ((long + 1) / 2).floor()).clamp(0, side))
    top, bottom, left, right = ends
    return torch.stack(ends, 1).long(), (bottom - top) * (right - left)


def mix(images: Tensor, targets: Tensor, draws: MixDraws) -> tuple[Tensor, Tensor]:
    """Images and their soft targets (batch, classes), mixed in pairs."""
    if len(images) % 2:
        raise ShapeError(f"images are mixed in pairs: a batch, and each share of it, must be even; got {len(images)}")
    height, width = images.shape[-2:]
    top, bottom, left, right = draws.box[:, :, None].unbind(1)
    rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
    others = _partners(images)
    keep = draws.keep[:, None, None, None]
    cut = torch.where(inside[:, None], others, images)
    mixed = torch.where(draws.cut[:, None, None, None], cut, keep * images + (1 - keep) * others)
    weight = draws.keep[:, None]
    return mixed, weight * targets + (1 - weight) * _partners(targets)


def _partners(rows: Tensor) -> Tensor:
    """Each row's neighbour: 1, 0, 3, 2, …"""
    return rows.reshape(-1, 2, *rows.shape[1:]).flip(1).reshape(rows.shape)


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Labels as distributions (batch, classes): `smoothing` of the weight spread evenly over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
