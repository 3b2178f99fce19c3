"""The corners of a spectrum's convex hull: |1 + λμ| is convex in λ, so no other eigenvalue can dominate."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def corners(eigenvalues: NDArray[np.complex128]) -> Tensor:
    """The corners of each row's convex hull (rows, k); short rows repeat one."""
    hulls = [eigenvalues[i][hull_indices(eigenvalues[i])].tolist() for i in range(len(eigenvalues))]
    longest = max(len(hull) for hull in hulls)
    return torch.tensor([hull + hull[-1:] * (longest - len(hull)) for hull in hulls], dtype=torch.complex128)


def hull_indices(points: NDArray[np.complex128]) -> list[int]:
    """Where the corners stand, by Andrew's monotone chain: lower and upper boundary, each turning one way only."""
    _, first = np.unique(points, return_index=True)  # sorted by real part, then by imaginary part
    ordered: list[int] = first.tolist()
    if len(ordered) <= 2:
        return ordered
    boundary: list[int] = []
    for chain in (ordered, ordered[::-1]):
        side: list[int] = []
        for i in chain:
            while len(side) > 1 and _turn(points[side[-2]], points[side[-1]], points[i]) <= 0:
                side.pop()
            side.append(i)
        boundary += side[:-1]
    return boundary


def _turn(a: complex, b: complex, c: complex) -> float:
    return ((b - a).conjugate() * (c - a)).imag
