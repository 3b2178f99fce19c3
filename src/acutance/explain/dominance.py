"""Which family of eigenvalues dominates I + H⊗A, sample by sample, and whether that predicts what the tokens do.

The spectrum of I + H⊗A is {1 + λ_j μ_i}. |1 + λμ| is convex in μ and in λ, so only corners of either spectrum can
dominate: for a real spectrum of A that is μ = 1 or μ_min (https://arxiv.org/abs/2401.04301).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.kernels.spectral import DENSE_TOKENS
from acutance.metrics import hfc_lfc_spectral
from acutance.operator import AttentionOperator

# Closer to a draw than this share of |λ|, or of HFC/LFC, nothing dominates and nothing changed.
TIE = 1e-6


@dataclass(frozen=True)
class Share:
    """In which share of cases each family dominates; what is missing to one is ties."""

    smoothing: float  # μ = 1
    sharpening: float  # any other μ

    def __str__(self) -> str:
        return f"{100 * self.smoothing:.4g}/{100 * self.sharpening:.4g}"


@dataclass(frozen=True)
class Outcome:
    """What HFC/LFC (spectral norm, all tokens) did from one place to the next, against the prediction."""

    fell: float  # share of samples in which it fell: smoothed
    agreement: float  # share of samples in which it did what the dominating family says; NaN without a prediction
    change: float  # mean of log(after / before); negative is smoothing

    @property
    def base_rate(self) -> float:
        """What always guessing the commoner outcome would score: an agreement means little unless it is above."""
        return max(self.fell, 1 - self.fell)


@dataclass(frozen=True, eq=False)
class Dominance:
    """Which family dominates one layer's I + H⊗A over samples, per head, and what the tokens did."""

    samples: int
    mu_min: NDArray[np.float64]  # (heads,): the smallest real part of A's spectrum, mean over samples
    mu_min_lowest: NDArray[np.float64]
    mu_min_highest: NDArray[np.float64]
    heads: tuple[Share, ...]  # I + H_h⊗A_h, each head with its own part of H
    whole: tuple[Share, ...] | None  # I + H⊗A_h, each head's attention with the layer's whole H
    predicted: Share | None  # for the layer, once per sample; None for several heads without the whole H
    branch: Outcome  # X → X + attention branch
    block: Outcome  # X → the block's output

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        arrays = {name: np.array(data[name], dtype=np.float64) for name in data if name.startswith("mu_min")}
        shares = {
            name: None if data[name] is None else tuple(Share(**s) for s in data[name]) for name in ("heads", "whole")
        }
        predicted = None if data["predicted"] is None else Share(**data["predicted"])
        outcomes = {name: Outcome(**{k: float(v) for k, v in data[name].items()}) for name in ("branch", "block")}
        return cls(**{**data, **arrays, **shares, **outcomes, "predicted": predicted})


def growth(z: Any) -> Any:
    """|1 + z|² − 1 of a complex array or tensor: compares gains without the rounding of 1 + z for small z."""
    return 2 * z.real + z.real**2 + z.imag**2


def other_eigenvalues(A: AttentionOperator) -> Tensor:
    """The eigenvalues of A that compete with μ = 1, complex (batch, heads, m).

    All but that one up to 512 tokens and for a causal A, where they are exact; above, the one of smallest real part,
    found on products with A. With one token there is no competitor, and μ = 1 stands in for it: a tie.
    """
    tokens = A.shape[-1]
    if tokens > DENSE_TOKENS and not A.causal:
        return A.extreme_eigenvalues()[1].unsqueeze(-1)
    values = A.eigenvalues()
    if tokens == 1:
        return values
    one = (values - 1).abs().argmin(-1, keepdim=True)
    others = torch.ones_like(values.real, dtype=torch.bool).scatter(-1, one, False)
    remaining: Tensor = values[others].unflatten(0, (*values.shape[:-1], tokens - 1))
    return remaining


def family_growths(eigenvalues: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """max_j growth(λ_j μ) per sample and head, at μ = 1 and over the other μ.

    Args:
        eigenvalues: λ (heads or 1, k).
        others: μ (batch, heads, m).
    """
    products = eigenvalues[None, :, :, None] * others[:, :, None, :]
    return growth(eigenvalues).amax(-1).expand(others.shape[:2]), growth(products).amax((-2, -1))


def corners(eigenvalues: NDArray[np.complex128]) -> Tensor:
    """The corners of each row's convex hull (rows, k): no other eigenvalue can dominate. Short rows repeat one."""
    hulls = [_hull(row) for row in eigenvalues]
    longest = max(len(hull) for hull in hulls)
    return torch.tensor([hull + hull[-1:] * (longest - len(hull)) for hull in hulls], dtype=torch.complex128)


def leaning(smoothing: Tensor, other: Tensor, scale: Tensor | float) -> Tensor:
    """1 where μ = 1 dominates, −1 where another μ does, 0 for a tie."""
    lead = smoothing - other
    return torch.where(lead.abs() <= TIE * scale, 0.0, lead.sign())


class LayerReader:
    """Tallies one layer over batches; holds the layer's input tokens while the layer runs, and sums."""

    def __init__(
        self, heads: NDArray[np.complex128], whole: NDArray[np.complex128] | None, gain: Tensor | None
    ) -> None:
        self.corners = {"heads": corners(heads)} | ({} if whole is None else {"whole": corners(whole[None])})
        # The spectra of several heads say nothing certain of their sum, so they make no prediction.
        self.deciding = "whole" if whole is not None else "heads" if len(heads) == 1 else None
        self.gain = gain
        self.tokens = self.before = torch.empty(0)
        self.predicted: Tensor | None = None
        self.count = 0
        self.sums: dict[str, Tensor] = {}
        self.lowest = self.highest = torch.empty(0)

    def enter(self, tokens: Tensor) -> None:
        """The tokens come into the block."""
        self.tokens, self.before = tokens, hfc_lfc_spectral(tokens)

    def attend(self, A: AttentionOperator, branch: Tensor) -> None:
        """The attention branch is done: who dominates, and what do the tokens do?"""
        others = other_eigenvalues(A)
        for scope, points in self.corners.items():
            points = points.to(others.device)
            smoothing, other = family_growths(points, others)
            size = points.abs().amax()
            lean = leaning(smoothing, other, size)
            self._add(f"{scope} smoothing", lean > 0)
            self._add(f"{scope} sharpening", lean < 0)
            if scope == self.deciding:
                # All heads share the constant vector: on constant tokens the layer is exactly I + H. On the others it
                # is I + Σ H_h⊗A_h, and the largest |1 + λμ| over the heads' A_h stands in for its largest eigenvalue.
                self.predicted = leaning(smoothing.amax(1), other.amax(1), size)
                self._add("predicted smoothing", self.predicted > 0)
                self._add("predicted sharpening", self.predicted < 0)
        self._keep_smallest(others.real.amin(-1))
        self._compare("branch", self.tokens + (branch if self.gain is None else self.gain * branch))

    def leave(self, tokens: Tensor) -> None:
        """The tokens leave the block."""
        self._compare("block", tokens)
        self.count += len(tokens)
        self.tokens = torch.empty(0)

    def result(self) -> Dominance:
        """What was found so far."""
        means = {name: (total / self.count).cpu().numpy() for name, total in self.sums.items()}

        def shares(scope: str) -> tuple[Share, ...]:
            pairs = zip(means[f"{scope} smoothing"], means[f"{scope} sharpening"], strict=True)
            return tuple(Share(float(a), float(b)) for a, b in pairs)

        def outcome(place: str) -> Outcome:
            return Outcome(*(float(means.get(f"{place} {what}", math.nan)) for what in ("fell", "agreement", "change")))

        def predicted() -> Share | None:
            pair = [float(means[name]) for name in ("predicted smoothing", "predicted sharpening") if name in means]
            return Share(*pair) if pair else None

        return Dominance(
            samples=self.count,
            mu_min=means["mu_min"],
            mu_min_lowest=self.lowest.cpu().numpy(),
            mu_min_highest=self.highest.cpu().numpy(),
            heads=shares("heads"),
            whole=shares("whole") if "whole" in self.corners else None,
            predicted=predicted(),
            branch=outcome("branch"),
            block=outcome("block"),
        )

    def _compare(self, place: str, tokens: Tensor) -> None:
        change = torch.log(hfc_lfc_spectral(tokens) / self.before).double()
        moved = leaning(-change, torch.zeros_like(change), 1.0)
        self._add(f"{place} fell", moved > 0)
        if self.predicted is not None:
            self._add(f"{place} agreement", moved == self.predicted)
        self._add(f"{place} change", change)

    def _keep_smallest(self, mu_min: Tensor) -> None:
        mu_min = mu_min.double()
        self._add("mu_min", mu_min)
        low, high = mu_min.amin(0), mu_min.amax(0)
        first = self.lowest.numel() == 0
        self.lowest = low if first else torch.minimum(self.lowest, low)
        self.highest = high if first else torch.maximum(self.highest, high)

    def _add(self, name: str, per_sample: Tensor) -> None:
        total = per_sample.double().sum(0)
        self.sums[name] = total + self.sums[name] if name in self.sums else total


def _hull(points: NDArray[np.complex128]) -> list[complex]:
    """Andrew's monotone chain: lower and upper boundary, each by turning one way only."""
    ordered = sorted({complex(p) for p in points}, key=lambda p: (p.real, p.imag))
    if len(ordered) <= 2:
        return ordered
    boundary: list[complex] = []
    for chain in (ordered, ordered[::-1]):
        side: list[complex] = []
        for p in chain:
            while len(side) > 1 and ((side[-1] - side[-2]).conjugate() * (p - side[-2])).imag <= 0:
                side.pop()
            side.append(p)
        boundary += side[:-1]
    return boundary


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, (Share, Outcome)):
        return {name: _plain(item) for name, item in vars(value).items()}
    # JSON has no infinity and no NaN; float() reads their names.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
