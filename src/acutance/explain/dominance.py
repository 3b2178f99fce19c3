"""Which family of eigenvalues dominates I + H⊗A over samples, and whether that predicts what the tokens do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Share:
    """In which share of cases each family dominates; what is missing to one is ties."""

    smoothing: float  # μ = 1
    sharpening: float  # any other μ

    def __str__(self) -> str:
        return f"{100 * self.smoothing:.4g}/{100 * self.sharpening:.4g}"


@dataclass(frozen=True)
class Outcome:
    """What HFC/LFC (spectral norm) did from one place to the next, against the prediction; NaN without one."""

    fell: float  # share of samples in which it fell: smoothed
    agreement: float  # share of samples in which it did what the dominating family says
    change: float  # mean of log(after / before); negative is smoothing
    fell_if_smoothing: float  # P(fell | predicted smoothing); NaN if that never was
    rose_if_sharpening: float  # P(rose | predicted sharpening)
    correlation: float  # Spearman's, of the predicted with the measured change; NaN if one of them does not vary

    @property
    def base_rate(self) -> float:
        """What always guessing the commoner outcome would score: an agreement means little unless it is above."""
        return max(self.fell, 1 - self.fell)


@dataclass(frozen=True, eq=False)
class Dominance:
    """Which family dominates one layer's I + H⊗A over samples, per head, and what the tokens did."""

    samples: int
    mu_min_by_sample: NDArray[np.float64]  # (samples, heads): the smallest real part of A's spectrum
    mu_largest_by_sample: NDArray[np.float64]  # (samples, heads): the largest |μ| but that of the constant mode
    mu_error: float  # the largest residual ‖Az − μz‖; 0 where all eigenvalues of A were found
    heads: tuple[Share, ...]  # I + H_h⊗A_h, each head with its own part of H
    whole: tuple[Share, ...] | None  # I + H⊗A_h, each head's attention with the layer's whole H
    predicted: Share | None  # for the layer, once per sample; None for several heads without the whole H
    undecided: float  # share of samples in which the errors of λ and μ leave the prediction open; NaN likewise
    predicted_change: float  # log of the long-run factor of HFC/LFC per layer, mean over samples; NaN likewise
    branch: Outcome  # X → X + attention branch
    block: Outcome  # X → the block's output

    @property
    def mu_min(self) -> NDArray[np.float64]:
        """(heads,): the smallest real part of A's spectrum, mean over samples."""
        mean: NDArray[np.float64] = self.mu_min_by_sample.mean(0)
        return mean

    @property
    def mu_min_highest(self) -> float:
        """The largest μ_min of any sample and head: the strictest for a negative λ."""
        return float(self.mu_min_by_sample.max())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        arrays = {name: np.array(data[name], dtype=np.float64) for name in data if name.endswith("by_sample")}
        shares = {
            name: None if data[name] is None else tuple(Share(**s) for s in data[name]) for name in ("heads", "whole")
        }
        predicted = None if data["predicted"] is None else Share(**data["predicted"])
        outcomes = {name: Outcome(**{k: float(v) for k, v in data[name].items()}) for name in ("branch", "block")}
        numbers = {name: float(data[name]) for name in ("mu_error", "undecided", "predicted_change")}
        return cls(**{**data, **arrays, **shares, **outcomes, **numbers, "predicted": predicted})


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, (Share, Outcome)):
        return {name: _plain(item) for name, item in vars(value).items()}
    # JSON has no infinity and no NaN; float() reads their names.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
