"""Student's t intervals of means."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache
def student(freedom: float, level: float = 0.95) -> float:
    """How many standard errors the interval reaches: t = √ν tan θ, where θ has a density like cos(θ)^(ν − 1)."""
    freedom = min(freedom, 1e5)
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    share = np.r_[0, np.cumsum(density[1:] + density[:-1])]
    return math.sqrt(freedom) * math.tan(float(np.interp(level, share / share[-1], angle)))


def margin_of(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Half the 95 % interval of the mean; NaN for one value."""
    count = len(values)
    return student(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
