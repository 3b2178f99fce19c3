"""Statistics of paired runs: spread over seeds, the sign-flip and the paired t test, and Holm's correction."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from acutance.errors import AcutanceError

MOST_PAIRS = 40  # 2²⁰ sums in each half
ROUNDING = 1e-9  # two sums closer than this, relative to the sum of sizes, are equal


def spread_of(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The standard deviation over seeds; NaN for one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def with_spread(mean: float, spread: float, digits: int = 2) -> str:
    """`72.17 ± 0.10`, or the mean alone for one seed."""
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if np.isfinite(spread) else "")


@dataclass(frozen=True)
class Paired:
    """The difference between two groups at the same seeds."""

    mean: float
    spread: float  # standard deviation over pairs; NaN for one
    p: float  # of the two-sided sign-flip test
    pairs: int

    @property
    def smallest_p(self) -> float:
        """The smallest p that this many pairs can give: 0.25 for 3 pairs; below 0.05 takes 6."""
        return float(2.0 ** (1 - self.pairs))


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """second − first, pair by pair."""
    differences = np.subtract(second, first, dtype=np.float64)
    return Paired(float(differences.mean()), spread_of(differences), sign_flip_p(differences), len(differences))


def sign_flip_p(differences: Sequence[float] | NDArray[np.float64]) -> float:
    """The share of all 2ⁿ choices of signs whose sum is at least as far from 0 as the observed one.

    Exact. The sums over the first half of the pairs are looked up among the sorted sums over the second, so 40 pairs
    need two million sums.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not 1 <= len(values) <= MOST_PAIRS or not np.isfinite(values).all():
        raise AcutanceError(f"a paired test takes 1 to {MOST_PAIRS} finite differences, got {len(values)}")
    bound = abs(values.sum()) - ROUNDING * np.abs(values).sum()
    half = len(values) // 2
    left, right = (
        reduce(lambda sums, value: np.r_[sums + value, sums - value], part, np.zeros(1))
        for part in (values[:half], values[half:])
    )
    right.sort()
    at_least = len(right) - np.searchsorted(right, bound - left, side="left")
    at_most = np.searchsorted(right, -bound - left, side="right")
    far = int(at_least.sum() + at_most.sum())
    return min(1.0, far / (len(left) * len(right)))  # if the bound is 0, a sum of 0 is counted twice


def paired_t(differences: Sequence[float]) -> float | None:
    """p of the two-sided paired t test; None for one pair."""
    if len(differences) < 2:
        return None
    mean, error = float(np.mean(differences)), float(stats.sem(differences))
    if error == 0:
        return float(mean == 0)
    return float(2 * stats.t.sf(abs(mean) / error, len(differences) - 1))


def holm(ps: Sequence[float]) -> list[float]:
    """The p values of one table after Holm's correction for their number, in the same order."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected
