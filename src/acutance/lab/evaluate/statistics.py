"""Statistics of paired runs: the paired t test, and Holm's correction. The sign-flip test is in compare."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


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
