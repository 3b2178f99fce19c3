"""An exact paired test over seeds: how often would random signs give a mean difference as large?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from acutance.errors import AcutanceError

MOST = 40  # differences: 2²⁰ sums in each half
ROUNDING = 1e-9  # of the sum of sizes: below it two sums are equal


@dataclass(frozen=True)
class Paired:
    """The difference between two groups at the same seeds."""

    mean: float
    spread: float  # standard deviation over pairs; NaN for one
    p: float  # of the two-sided sign-flip test
    pairs: int

    @property
    def smallest_p(self) -> float:
        """What so many pairs can show at best: 3 pairs never get below 0.25, 6 are needed for 0.05."""
        return float(2.0 ** (1 - self.pairs))


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """second − first, pair by pair."""
    differences = np.subtract(second, first, dtype=np.float64)
    spread = float(differences.std(ddof=1)) if len(differences) > 1 else float("nan")
    return Paired(float(differences.mean()), spread, sign_flip_p(differences), len(differences))


def sign_flip_p(differences: Sequence[float] | NDArray[np.float64]) -> float:
    """The share of all 2ⁿ choices of signs whose sum is at least as far from 0 as the one observed.

    Exact: if the two groups do not differ, each pair's difference is as likely to have either sign. The sums of the
    first half of the pairs meet the sorted ones of the second, so 40 pairs cost two million sums instead of 2⁴⁰.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not 1 <= len(values) <= MOST or not np.isfinite(values).all():
        raise AcutanceError(f"a paired test takes 1 to {MOST} finite differences, got {len(values)}")
    bound = abs(values.sum()) - ROUNDING * np.abs(values).sum()
    half = len(values) // 2
    left, right = _signed_sums(values[:half]), np.sort(_signed_sums(values[half:]))
    at_least = len(right) - np.searchsorted(right, bound - left, side="left")
    at_most = np.searchsorted(right, -bound - left, side="right")
    far = int(at_least.sum() + at_most.sum())
    return min(1.0, far / (len(left) * len(right)))  # a bound of 0 counts a sum of 0 twice


def _signed_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums under all choices of signs; of no values, one empty sum."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums
