"""Eigenvalues of an operator known only by its products: block Arnoldi, batched over leading axes."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.errors import AcutanceWarning

BLOCK = 8  # a fused product costs the same for a few vectors as for one, and a block finds repeated eigenvalues
LARGEST_SPACE = 512
MOST_VALUES = LARGEST_SPACE // 4  # more would not converge in the largest space

Select = Callable[[Tensor], Tensor]  # Ritz values (..., m) -> indices (..., k) of the wanted ones


class Ritz(NamedTuple):
    """What a Krylov space says of the selected eigenvalues."""

    values: Tensor  # (..., k)
    residuals: Tensor  # (..., k): ‖Az − μz‖ for the unit vector z of each
    size: int  # of the space

    @property
    def residual(self) -> float:
        """The largest of the residuals."""
        return float(self.residuals.max())


def arnoldi_eigenvalues(multiply: Callable[[Tensor], Tensor], start: Tensor, select: Select, count: int) -> Tensor:
    """The `count` selected eigenvalues; a warning gives the residual where they have not converged."""
    tolerance = torch.finfo(start.dtype).eps ** (2 / 3)
    found = arnoldi(multiply, start, select, count, tolerance)
    if not found.residual <= tolerance:
        warnings.warn(
            f"eigenvalues not converged in a Krylov space of {found.size} vectors: the largest residual ‖Az − μz‖ "
            f"is {found.residual:.1e}, wanted {tolerance:.1e}; the largest ones are good, ask for fewer",
            AcutanceWarning,
            stacklevel=3,
        )
    return found.values


def arnoldi(multiply: Callable[[Tensor], Tensor], start: Tensor, select: Select, count: int, tolerance: float) -> Ritz:
    """The selected eigenvalues, about `count`, with the space grown until their residuals are within the tolerance.

    `start` is a block of vectors (..., N, b), `multiply` the operator on such a block. The residual ‖Az − μz‖
    of a Ritz pair is read off the last block row of the projected matrix, so that checking costs no product.
    """
    width = start.size(-1)
    largest = min(LARGEST_SPACE, start.size(-2)) // width * width
    basis, _ = torch.linalg.qr(start)
    projected = start.new_zeros(*start.shape[:-2], largest + width, largest)
    size, next_check = 0, max(4 * width, 2 * count)
    while True:
        size += width
        coefficients, fresh = _orthogonalise(multiply(basis[..., -width:]), basis)
        projected[..., : size + width, size - width : size] = coefficients
        if size >= min(next_check, largest):
            values, residuals = _ritz(projected[..., : size + width, :size], width)
            wanted = select(values)
            found = Ritz(values.gather(-1, wanted).to(start.device), residuals.gather(-1, wanted), size)
            if found.residual <= tolerance or size >= largest:
                return found
            next_check = size + max(width, size // 4)
        basis = torch.cat([basis, fresh], dim=-1)


def _orthogonalise(block: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal block that completes the basis, preceded by the block's coefficients in the two."""
    inside = block.new_zeros(*block.shape[:-2], basis.size(-1), block.size(-1))
    outside = torch.eye(block.size(-1), dtype=block.dtype, device=block.device)
    # Twice for the accuracy of the basis; a third time because a block that adds nothing new (an invariant
    # space) is completed by QR with vectors that are arbitrary, not yet orthogonal to the basis.
    for _ in range(3):
        along = basis.mT @ block
        inside = inside + along @ outside
        block, triangle = torch.linalg.qr(block - basis @ along)
        outside = triangle @ outside
    return torch.cat([inside, outside.expand(*inside.shape[:-2], -1, -1)], dim=-2), block


def _ritz(projected: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Ritz values and the residuals of their unit vectors."""
    size = projected.size(-1)
    projected = projected.cpu()  # small, and LAPACK is the faster there
    values, vectors = torch.linalg.eig(projected[..., :size, :])
    last_rows = projected[..., size:, size - width :].to(vectors.dtype)
    return values, torch.linalg.vector_norm(last_rows @ vectors[..., size - width :, :], dim=-2)
