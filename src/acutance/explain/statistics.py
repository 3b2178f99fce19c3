"""Spearman's rank correlation, so that SciPy is not needed for one number, and a mean of what is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson's correlation of the ranks, ties sharing their mean rank; NaN if either does not vary."""
    first, second = _ranks(a), _ranks(b)
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def mean_known(values: NDArray[np.float64]) -> float:
    """The mean of the entries that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = (last - (counts - 1) / 2)[where]
    return mean
