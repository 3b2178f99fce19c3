"""Blur of the lens, of glass and of motion. Images are in [0, 1]; whoever calls cuts the result to that."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from acutance.lab.robustness import filters
from acutance.lab.robustness.draws import Draws


def gaussian(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """A Gaussian of this many pixels."""
    return filters.gaussian(x, (sigma, sigma))


def defocus(x: Tensor, draws: Draws, radius: int, soften: float) -> Tensor:
    """A point becomes a disk."""
    return filters.convolve(x, filters.disk(radius, soften), "mirror")


def glass(x: Tensor, draws: Draws, sigma: float, reach: int, rounds: int) -> Tensor:
    """Pixels taken from their neighbourhood, between two Gaussians."""
    soft = (filters.gaussian(x, (sigma, sigma)) * 255).floor() / 255
    height, width = x.shape[-2:]
    source = torch.arange(height * width, device=x.device).repeat(len(x), 1)
    # The benchmark's code means to swap two pixels, but overwrites the first before it copies it: so we copy, too. One
    # pixel after the other, since a copy may be copied again.
    spots = [(i, j) for i in range(height - reach, reach, -1) for j in range(width - reach, reach, -1)]
    for _ in range(rounds):
        steps = draws.integers(2, len(spots), len(x), low=-reach, high=reach)
        for (i, j), down, right in zip(spots, steps[0], steps[1], strict=True):
            source[:, i * width + j] = source.gather(1, ((i + down) * width + j + right)[:, None])[:, 0]
    mixed = soft.flatten(2).gather(2, source[:, None].expand(-1, x.size(1), -1)).view_as(x)
    return filters.gaussian(mixed, (sigma, sigma))


def motion(x: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """Along a line within 45° of the horizontal."""
    return filters.streak(x, radius, sigma, draws.uniform(len(x), low=-45, high=45))


def zoom(x: Tensor, draws: Draws, end: float, step: float) -> Tensor:
    """The mean of the image and its enlargements from 1 up to `end`."""
    factors = np.arange(
        1, end, step
    ).tolist()  # as the benchmark counts: rounding lets 1.11 in, but neither 1.16 nor 1.21
    height, width = x.shape[-2:]
    layers = sum((filters.zoomed(x, factor)[..., :height, :width] for factor in factors), x)
    return layers / (len(factors) + 1)
