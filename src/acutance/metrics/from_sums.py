"""Token metrics from a few sums over each sample's tokens, as `acutance.metrics.kernels.token_sums` gives them.

The formulas are those of `acutance.metrics.tokens`, of samples that hold no NaN. They are NumPy's, so that all layers'
samples are one array and the device has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from acutance.metrics.kernels.token_sums import FIELDS

Numbers = NDArray[np.float64]


def _fields(sums: Numbers, *names: str) -> list[Numbers]:
    return [sums[..., FIELDS.index(name)] for name in names]


def _ratio(numerator: Numbers, denominator: Numbers, at_zero: Numbers | float = 0.0) -> Numbers:
    nonzero = denominator != 0
    return np.where(nonzero, numerator / np.where(nonzero, denominator, 1), at_zero)


def _token_cosine(sums: Numbers) -> Numbers:
    count, pairs = _fields(sums, "count", "pairs")
    return np.clip(_ratio(pairs, count * (count - 1), at_zero=1.0), -1, 1)


def _hfc_lfc_frobenius(sums: Numbers) -> Numbers:
    high, low = _fields(sums, "high", "low")
    return np.sqrt(_ratio(high, low, at_zero=np.where(high > 0, np.inf, 0.0)))


def _rank_residual(sums: Numbers) -> Numbers:
    high, low = _fields(sums, "high", "low")
    return np.sqrt(_ratio(high, high + low))


def _norm_spread(sums: Numbers) -> Numbers:
    mean, variance = _fields(sums, "norm_mean", "norm_variance")
    return _ratio(np.sqrt(variance), mean)


FROM_SUMS: dict[str, Callable[[Numbers], Numbers]] = {
    "token_cosine": _token_cosine,
    "hfc_lfc_frobenius": _hfc_lfc_frobenius,
    "rank_residual": _rank_residual,
    "norm_spread": _norm_spread,
}
