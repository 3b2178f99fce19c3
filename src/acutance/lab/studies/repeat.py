"""One attention layer repeated, X ← X + A X W, with or without a norm (Fig. 4 of https://arxiv.org/abs/2401.04301)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from acutance import metrics
from acutance.errors import AcutanceError, ShapeError
from acutance.lab.studies.pictures import repeat_picture
from acutance.report.pictures import Figure
from acutance.report.tables import DataFrame, data_frame

Norm = Literal["none", "pre", "post"]
# A matrix, or a function of the branch's input tokens and of the layer's number (from 1).
Attention = Tensor | Callable[[Tensor, int], Tensor]

NORM_EPS = 1e-12
READ_AT_ONCE = 64  # layers; measuring them one by one would take longer than computing them
DEFINITIONS = ("hfc_lfc", "cosine", "min_cosine", "singular_ratio")


@dataclass(frozen=True)
class Trajectory:
    """The three definitions of over-smoothing by depth, each (samples, layers + 1); column 0 is the input.

    Each definition is weaker than the one before: input convergence (hfc_lfc → 0) implies angle convergence
    (min_cosine → 1), which implies rank collapse (singular_ratio → 0).
    """

    hfc_lfc: NDArray[np.float64]  # ‖HFC‖/‖LFC‖ in the spectral norm
    cosine: NDArray[np.float64]  # mean over pairs of tokens
    min_cosine: NDArray[np.float64]  # the pair furthest apart
    singular_ratio: NDArray[np.float64]  # σ₂/σ₁
    last: Tensor  # the tokens after the last layer

    @property
    def layers(self) -> int:
        return int(self.hfc_lfc.shape[1]) - 1

    def converged(self, tolerance: float = 1e-3) -> dict[str, bool]:
        """Which definitions the last layer meets in every sample, up to a tolerance."""
        return {
            "input": bool((self.hfc_lfc[:, -1] < tolerance).all()),
            "angle": bool((self.min_cosine[:, -1] > 1 - tolerance).all()),
            "rank": bool((self.singular_ratio[:, -1] < tolerance).all()),
        }

    def to_frame(self) -> DataFrame:
        """One row per sample and layer."""
        places = np.ndindex(self.hfc_lfc.shape)
        rows = ({"sample": at[0], "layer": at[1], **{n: getattr(self, n)[at] for n in DEFINITIONS}} for at in places)
        return data_frame([*rows])

    def picture(self) -> Figure:
        """The three definitions side by side, each as a value that falls to 0 when it is met."""
        return repeat_picture({"": {"": self}})


@torch.no_grad()
def repeat(
    x: Tensor, W: Tensor, attention: Attention, *, layers: int, norm: Norm = "none", norm_weight: Tensor | float = 1.0
) -> Trajectory:
    """Apply one layer repeatedly and measure the tokens after each.

    `none`: X + A X W. `pre`: X + A LN(X) W. `post`: LN(X + A X W). Without a norm, X is scaled back to its first size
    after every layer. That changes none of the definitions and keeps any depth finite; attention computed from X sees
    the scaled X. The norm's weights are one number or (d,); it has no bias.

    Tokens x are (..., N, d) with leading axes for samples, in float64 if a ratio falls far. W is W_V W_proj (d, d), so
    H = Wᵀ. Attention is A (..., N, N), or a function (tokens entering the branch, layer) → A.
    """
    if x.ndim < 2 or W.shape != (x.shape[-1], x.shape[-1]):
        raise ShapeError(f"x {tuple(x.shape)} and W {tuple(W.shape)} do not fit: expected (..., N, d) and (d, d)")
    if norm not in get_args(Norm):
        raise AcutanceError(f"unknown norm {norm!r}; known: {', '.join(get_args(Norm))}")
    if layers < 1:
        raise AcutanceError(f"repeat needs at least one layer, got {layers}")
    weight = torch.as_tensor(norm_weight, dtype=x.dtype, device=x.device).expand(x.shape[-1])
    size = x.norm(dim=(-2, -1), keepdim=True)
    readings, waiting = [], [x]
    for layer in range(1, layers + 1):
        branch = _layer_norm(x, weight) if norm == "pre" else x
        A = attention if isinstance(attention, Tensor) else attention(branch, layer)
        x = x + A @ branch @ W
        if norm == "post":
            x = _layer_norm(x, weight)
        elif norm == "none":
            x = x * (size / x.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny))
        waiting.append(x)
        if len(waiting) == READ_AT_ONCE or layer == layers:
            readings.append(_read(torch.stack(waiting)))
            waiting = []
    by_depth = torch.cat(readings, dim=1).reshape(len(DEFINITIONS), layers + 1, -1).mT
    curves = dict(zip(DEFINITIONS, by_depth.double().cpu().numpy(), strict=True))
    return Trajectory(**curves, last=x)


def attention_from(w_q: Tensor, w_k: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Attention computed from the tokens in every layer: softmax(X W_Q (X W_K)ᵀ/√k) with weights (d, k)."""
    scale = w_q.shape[-1] ** -0.5
    return lambda x, _layer: (x @ w_q @ (x @ w_k).mT * scale).softmax(-1)


def drawn_attention(tokens: int, sharpness: float = 1.0, seed: int = 0) -> Callable[[Tensor, int], Tensor]:
    """Random attention, new for every layer and independent of the tokens. A layer's draw depends on `seed` alone."""
    return lambda x, layer: random_attention(tokens, sharpness, seed=1_000_003 * seed + layer).to(x)


def random_attention(
    tokens: int, sharpness: float = 1.0, *, symmetric: bool = False, causal: bool = False, seed: int = 0
) -> Tensor:
    """A random row-stochastic A (N, N) in float64: the softmax of normal logits with deviation `sharpness`.

    `symmetric` normalises a symmetric positive definite kernel, so that every μ is in (0, 1], as in symmetric
    attention. `causal` lets each token see only itself and earlier ones.
    """
    logits = _normal(tokens, tokens, seed=seed)
    if symmetric:
        logits = logits @ logits.mT / tokens**0.5
    if causal:
        logits = logits.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    return (sharpness * logits).softmax(-1)


def branch_with_spectrum(eigenvalues: Sequence[float] | Tensor, seed: int = 0) -> Tensor:
    """A symmetric H (= W) in float64 with these eigenvalues and random orthogonal eigenvectors."""
    lam = torch.as_tensor(eigenvalues, dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(_normal(len(lam), len(lam), seed=seed)).Q
    return (basis * lam) @ basis.mT


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, eps=NORM_EPS)


def _read(x: Tensor) -> Tensor:
    """The definitions (4, ...), in the order of `DEFINITIONS`."""
    directions = metrics.unit_vectors(x)
    smallest = (directions @ directions.mT).amin((-2, -1)).clamp(-1, 1)
    return torch.stack([metrics.hfc_lfc_spectral(x), metrics.token_cosine(x), smallest, metrics.singular_ratio(x)])


# A name, the norm's place, and its weights, all of one sign.
NORMS: Mapping[str, tuple[Norm, float]] = {
    "no norm": ("none", 1.0),
    "Pre-LN, weights +1": ("pre", 1.0),
    "Pre-LN, weights −1": ("pre", -1.0),
    "Post-LN, weights +1": ("post", 1.0),
    "Post-LN, weights −1": ("post", -1.0),
}
# The interval that the eigenvalues of H fill evenly. The last lies below −2/(1 + μ_min) for every μ_min > −0.3.
SPECTRA: Mapping[str, tuple[float, float]] = {
    "λ in (0, 1]": (0.1, 1.0),
    "λ in [−1, 0)": (-1.0, -0.1),
    "λ in [−4, −3]": (-4.0, -3.0),
}


def norm_grid(
    *, layers: int = 60, tokens: int = 16, width: int = 16, samples: int = 5, attention: str = "fixed", seed: int = 0
) -> dict[str, dict[str, Trajectory]]:
    """Fig. 4 as data: trajectories of random inputs by norm and by spectrum. All inputs share the layer.

    Attention is fixed (one random A), drawn (a new A for every layer) or computed (from X, with fixed W_Q and W_K).
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, tokens, width, dtype=torch.float64, generator=generator)
    w_q, w_k = torch.randn(2, width, width, dtype=torch.float64, generator=generator) / width**0.5
    choices: dict[str, Attention] = {
        "fixed": random_attention(tokens, seed=seed),
        "drawn": drawn_attention(tokens, seed=seed),
        "computed": attention_from(w_q, w_k),
    }
    if attention not in choices:
        raise AcutanceError(f"unknown attention {attention!r}; known: {', '.join(choices)}")
    lams = {name: torch.linspace(low, high, width) for name, (low, high) in SPECTRA.items()}
    branches = {name: branch_with_spectrum(lam, seed=seed) for name, lam in lams.items()}
    return {
        name: {
            spectrum: repeat(x, H.mT, choices[attention], layers=layers, norm=norm, norm_weight=weight)
            for spectrum, H in branches.items()
        }
        for name, (norm, weight) in NORMS.items()
    }
