"""Noise of the sensor. Images are in [0, 1]; whoever calls cuts the result to that."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.lab.robustness.draws import Draws


def gaussian(x: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Of one deviation everywhere."""
    return x + deviation * draws.normal(*x.shape)


def shot(x: Tensor, draws: Draws, photons: float) -> Tensor:
    """Each value counted in photons, `photons` of them for white."""
    return draws.poisson(x * photons) / photons


def impulse(x: Tensor, draws: Draws, share: float) -> Tensor:
    """Salt and pepper: this share of the values becomes black or white."""
    hit = draws.uniform(*x.shape) <= share
    return torch.where(hit, (draws.uniform(*x.shape) <= 0.5).to(x.dtype), x)


def speckle(x: Tensor, draws: Draws, deviation: float) -> Tensor:
    """In proportion to the value itself."""
    return x + deviation * x * draws.normal(*x.shape)
