"""Statistics of paired runs: intervals, the paired t test, and Holm's correction. The sign-flip test is in compare."""

import math
from collections.abc import Sequence

import numpy as np

HALVINGS = 100  # of the bracket around a quantile


def student_within(t: float, freedom: int) -> float:
    """P(|T| ≤ t) of Student's T with a whole number of degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for step in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (step - 1) / step
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def student_quantile(share: float, freedom: int) -> float:
    """The t within which this share of |T| lies."""
    low, high = 0.0, 1.0
    while student_within(high, freedom) < share:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, freedom) < share else (low, middle)
    return high


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float] | None:
    """Of the mean, by Student's t; None for one value."""
    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = student_quantile(share, len(values) - 1) * error
    return mean - half, mean + half


def paired_t(differences: Sequence[float]) -> float | None:
    """p of the two-sided paired t test; None for one pair."""
    if len(differences) < 2:
        return None
    mean, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if spread == 0:
        return 1.0 if mean == 0 else 0.0
    return 1 - student_within(mean / spread * math.sqrt(len(differences)), len(differences) - 1)


def holm(ps: Sequence[float]) -> list[float]:
    """The p values of one table, corrected for their number; in the same order."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected
