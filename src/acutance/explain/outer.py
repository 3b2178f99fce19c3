"""The eigenvalues of a wide H that can decide anything, found from products alone.

Everything `explain` says of a layer is a maximum over λ of |1 + λμ| for some μ, or the smallest or largest real part.
All of these are convex in λ, so they are attained at the corners of the spectrum's convex hull. These are the
outermost eigenvalues, which Arnoldi iteration finds first.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.attention import spectra
from acutance.errors import AcutanceWarning
from acutance.explain.corners import hull_indices

ROUNDING = 100  # how many times a dtype's precision a residual may be, as a share of the rms of H's singular values


def outer_eigenvalues(projection: Tensor, value: Tensor, *, layer: int) -> tuple[NDArray[np.complex128], float]:
    """The corners of the convex hull of the spectrum of H = projection @ value, and the largest residual that counts.

    A residual ‖Hz − λz‖, z of unit length, means that λ is an eigenvalue of a matrix that close to H; λ itself may be
    further off if H is far from normal. If not every corner has converged, a warning says so, and the residual is that
    of the largest |1 + λ| and of the ends of Re λ. It is never given as less than what rounding makes of it.
    """
    tolerance = ROUNDING * torch.finfo(projection.dtype).eps
    dim, inner = projection.shape
    left, right = (projection, value) if dim <= inner else (value, projection)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(len(left), 1, dtype=left.dtype, generator=generator).to(left.device)
    start = start / start.norm()
    size = float((left @ (right @ start)).norm())  # ‖H‖_F/√d on average
    if size == 0:
        return np.zeros(1, dtype=np.complex128), 0.0

    def multiply(x: Tensor) -> Tensor:
        return left @ (right @ x) / size

    def corners(values: Tensor) -> Tensor:
        return torch.tensor(hull_indices(values.numpy()))

    # One vector at a time: a block finds repeated eigenvalues, which a maximum has no use for, but reaches a lower
    # power of H with as many vectors.
    found = spectra.arnoldi(multiply, start, corners, 16, tolerance)
    values = size * found.values.cpu().numpy().astype(np.complex128)
    ends = [int(np.abs(1 + values).argmax()), int(values.real.argmin()), int(values.real.argmax())]
    error = size * max(float(found.residuals[ends].max()), tolerance)
    if found.residual > tolerance:
        warnings.warn(
            f"layer {layer}: the outermost eigenvalues of the whole H have not all converged in a Krylov space of "
            f"{found.size} vectors; the residual of those that count is {error:.1e}, wanted "
            f"{size * tolerance:.1e}. explain(…, whole=True) finds all eigenvalues exactly",
            AcutanceWarning,
            stacklevel=2,
        )
    if dim > inner:  # the other product has every eigenvalue but dim − inner zeros
        values = np.append(values, 0)
        values = values[hull_indices(values)]
    return values, error
