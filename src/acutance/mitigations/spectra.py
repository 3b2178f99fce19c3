"""Signed spectra: how free numbers ψ become the eigenvalues λ of H (https://arxiv.org/abs/2401.04301).

A negative λ sharpens only above −2/(1 + μ_min), with μ_min < 1 the smallest eigenvalue of attention. That bound lies
below −1, so the clipped and the bounded spectrum, in [−1, 0], keep it whatever the attention; −ψ² need not.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

Sign = Literal["negative", "positive", "free"]
Spectrum = Literal["square", "clipped", "bounded"]

# How far inside an eigenvalue starts where the border itself has no gradient: ψ² at 0, a sigmoid at 0 and 1.
EDGE = 1e-3


def admissible(sign: Sign, spectrum: Spectrum) -> tuple[float, float]:
    """The closed interval that holds every λ of this kind."""
    most = math.inf if spectrum == "square" else 1.0
    return (0.0 if sign == "positive" else -most), (0.0 if sign == "negative" else most)


def eigenvalues(psi: Tensor, sign: Sign, spectrum: Spectrum) -> Tensor:
    """λ from ψ."""
    if spectrum == "clipped":
        clipped: Tensor = _Clip.apply(psi, *admissible(sign, spectrum))  # type: ignore[no-untyped-call]
        return clipped
    if sign == "free":
        return psi.tanh() if spectrum == "bounded" else psi
    size = psi.sigmoid() if spectrum == "bounded" else psi.square()
    return -size if sign == "negative" else size


def psi_for(wanted: Tensor, sign: Sign, spectrum: Spectrum) -> Tensor:
    """ψ with the admissible λ closest to the wanted ones, EDGE off a border that has no gradient."""
    low, high = admissible(sign, spectrum)
    if spectrum == "clipped":
        return wanted.clamp(low, high)
    if sign == "free":
        return wanted.clamp(low + EDGE, high - EDGE).atanh() if spectrum == "bounded" else wanted
    size = (-wanted if sign == "negative" else wanted).clamp_min(EDGE)
    return size.clamp_max(1 - EDGE).logit() if spectrum == "bounded" else size.sqrt()


class _Clip(torch.autograd.Function):
    """A clip that ψ can come back from: outside the range a gradient passes if following it leads inwards."""

    @staticmethod
    def forward(ctx: Any, psi: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(psi)
        ctx.range = low, high
        return psi.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ((psi,), (low, high), (gradient,)) = ctx.saved_tensors, ctx.range, gradients
        passes = ((psi >= low) | (gradient < 0)) & ((psi <= high) | (gradient > 0))
        return gradient * passes, None, None
