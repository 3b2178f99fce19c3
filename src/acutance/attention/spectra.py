"""Eigenvalues and stationary distributions of attention operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from acutance.attention.products import accumulation_dtype, add_mask
from acutance.errors import AcutanceError, require_finite, warn

if TYPE_CHECKING:
    from acutance.attention.operator import AttentionOperator

DENSE_TOKENS = 512  # below, the matrix is cheaper than products with it
LARGEST_DENSE_TOKENS = 4096
MOST_ERROR = 1e-6  # of a stationary distribution
BLOCK = 8  # a fused product costs the same for a few vectors as for one, and only a block finds repeated eigenvalues
LARGEST_SPACE = 512
MOST_VALUES = LARGEST_SPACE // 4  # more would not converge in the largest space
NOT_ONE = "attention mixes too slowly, or the mask leaves a seen token no keys, or cuts the tokens into parts"

Multiply = Callable[[Tensor], Tensor]
Select = Callable[[Tensor], Tensor]  # Ritz values (..., m) -> indices (..., k) of the wanted ones


def selected(A: AttentionOperator, select: Select, count: int) -> Ritz:
    """The selected eigenvalues: the diagonal, those of the matrix, or by Arnoldi iteration, which leaves residuals.

    More than 512 tokens take Arnoldi iteration, unless A is triangular or too many eigenvalues are asked for.
    """
    tokens = A.shape[-1]
    if A.is_triangular:
        values = require_finite(A.diagonal(), "the diagonal of A")
    elif tokens > DENSE_TOKENS and count <= MOST_VALUES:
        A = A.to(accumulation_dtype(A.q, A.k))
        plain, scale = A.without_sink(), 1 if A.sink is None else A.row_scale  # once for all products
        # Where rows sum to one, μ = 1 is known from the first product.
        return arnoldi(lambda x: scale * plain.apply(x), _start(A), select, count, tolerance_of(A))
    elif tokens > LARGEST_DENSE_TOKENS:
        raise AcutanceError(f"{count} eigenvalues would need the {tokens} × {tokens} matrix; pass k <= {MOST_VALUES}")
    elif A.is_reversible:
        # A = k_ij / d_i with k symmetric has the real spectrum of the symmetric k_ij / √(d_i d_j) = √(A_ij A_ji).
        entries = require_finite(A.dense(), "A")
        values = torch.linalg.eigvalsh(entries.sqrt() * entries.mT.sqrt())
    else:
        values = torch.linalg.eigvals(require_finite(A.dense(), "A"))
    values = values if values.is_complex() else torch.complex(values, torch.zeros_like(values))
    found = values.gather(-1, select(values))
    return Ritz(found, torch.zeros_like(found.real), tokens)


def tolerance_of(A: AttentionOperator) -> float:
    """How large residuals of eigenvalues of A may be."""
    return float(torch.finfo(accumulation_dtype(A.q, A.k)).eps ** (2 / 3))


def eigenvalues(A: AttentionOperator, select: Select, count: int) -> Tensor:
    """The selected eigenvalues, with a warning where they have not converged."""
    found = selected(A, select, count)
    if not (error := float(found.residuals.max())) <= (tolerance := tolerance_of(A)):
        what = f"eigenvalues not converged in {found.size} vectors: the largest residual ‖Az − μz‖ is {error:.1e}"
        warn(f"{what}, wanted {tolerance:.1e}; the largest ones are good, ask for fewer", stacklevel=5)
    return found.values


def stationary(A: AttentionOperator) -> Tensor:
    """The distribution π with πᵀA = πᵀ: where a long random walk over the tokens ends."""
    causal = A.masks_keys_only and A.causal
    if not causal and not A.is_reversible:
        return solve_stationary(A.dense()) if A.shape[-1] <= DENSE_TOKENS else _by_projection(A)
    # Detailed balance of a symmetric kernel: π_i ∝ d_i = Σ_j k_ij (arxiv.org/abs/2312.00751, Lemma 2).
    row_sums = torch.zeros(A.shape[:3], dtype=accumulation_dtype(A.q, A.k)).to(A.device) if causal else A.logsumexp()
    log_mass = add_mask(row_sums, None if A.mask4 is None else A.mask4.squeeze(-2))
    visible = log_mass != -torch.inf
    if not visible.any(dim=-1).all():
        raise AcutanceError("no stationary distribution: in some sequence every key is masked")
    if not causal:
        return require_finite(log_mass.softmax(dim=-1), "Σ_j A_ij")  # type: ignore[no-any-return]
    # The first token that can be seen sees itself alone, so every causal walk ends there.
    first = visible.to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.zeros_like(log_mass).scatter(-1, first, 1.0)


def solve_stationary(entries: Tensor) -> Tensor:
    """π (..., N) of a matrix (..., N, N), by solving (Aᵀ − I + 11ᵀ) π = 1, which is regular exactly if π is unique."""
    exact = require_finite(entries, "A").double()
    exact = exact / exact.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)  # exact sums
    identity = torch.eye(exact.shape[-1], dtype=torch.float64, device=exact.device)
    ones = torch.ones_like(exact[..., :1])
    # The second right-hand side is a probe: its solution explodes when the system is (nearly) singular.
    solutions: Tensor = torch.linalg.solve_ex(exact.mT - identity + 1.0, torch.cat([ones, random_like(ones)], -1))[0]
    solution, probe = solutions[..., :1], solutions[..., 1:]
    found = solution.clamp(min=0.0).to(entries.dtype)
    error = (exact.mT @ found.double() - found).abs().sum(-2) + (solution.sum(-2) - 1).abs()
    if not (error.max() <= MOST_ERROR and probe.abs().max() <= 1e10):  # NaN included
        raise AcutanceError(f"no unique stationary distribution was found (residual {error.max():.1e}): {NOT_ONE}")
    return found.squeeze(-1)


def _by_projection(A: AttentionOperator) -> Tensor:
    """The π of a Krylov space of Aᵀ that minimises ‖(Aᵀ − I) π‖; if none is good enough, that of the matrix.

    The smallest singular value of Aᵀ − I in that space is the residual; the next is 0 too where π is not unique.
    All in float64: in sharp attention the difference between 1 and the next eigenvalue is lost in float32.
    """
    precise = A.to(torch.float64)
    for basis, projected in _spaces(lambda x: precise.T @ x, _start(precise), first_check=4 * BLOCK):
        identity = torch.eye(*projected.shape[-2:], dtype=torch.float64)
        _, sizes, vectors = torch.linalg.svd(projected - identity)
        solution = basis @ vectors[..., -1:, :].mT.to(A.device)
        error = (sizes[..., -1].clamp(min=torch.finfo(torch.float64).eps) / sizes[..., -2]).max()
        if error <= MOST_ERROR**2:
            break
    found: Tensor = (solution / solution.sum(-2, keepdim=True)).clamp(min=0.0)
    residual = (precise.T @ found - found).abs().sum(-2).max() + (found.sum(-2) - 1).abs().max()
    if residual <= MOST_ERROR and error <= MOST_ERROR:
        return found.squeeze(-1).to(accumulation_dtype(A.q, A.k))
    if A.shape[-1] <= 2 * LARGEST_DENSE_TOKENS:  # one matrix at a time: a system is ten times as large as its entries
        return torch.stack([solve_stationary(entries) for entries in A.dense().flatten(0, 1)]).view(A.shape[:3])
    raise AcutanceError(f"no unique stationary distribution was found (residual {residual:.1e}): {NOT_ONE}")


def _start(A: AttentionOperator) -> Tensor:
    """Constant tokens and `BLOCK` − 1 random vectors."""
    start = random_like(A.q.new_empty(*A.shape[:3], BLOCK))
    start[..., 0] = 1
    return start


def random_like(x: Tensor) -> Tensor:
    """Normal numbers, the same on every device and at every call."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)


class Ritz(NamedTuple):
    """The selected eigenvalues as a Krylov space approximates them."""

    values: Tensor  # (..., k)
    residuals: Tensor  # (..., k): ‖Az − μz‖ for the unit vector z of each
    size: int  # of the space


def arnoldi(multiply: Multiply, start: Tensor, select: Select, count: int, tolerance: float) -> Ritz:
    """The selected eigenvalues, about `count`, with the space grown until their residuals are within the tolerance.

    `start` is a block of vectors (..., N, b), `multiply` the operator on such a block. The residual ‖Az − μz‖
    of a Ritz pair is read off the last block row of the projected matrix, so that checking costs no product.
    """
    width = start.size(-1)
    for _, small in _spaces(multiply, start, first_check=max(4 * width, 2 * count)):
        size = small.shape[-1]
        values, vectors = torch.linalg.eig(small[..., :size, :])
        last_rows = small[..., size:, size - width :].to(vectors.dtype)
        residuals = torch.linalg.vector_norm(last_rows @ vectors[..., size - width :, :], dim=-2)
        wanted = select(values)
        found = Ritz(values.gather(-1, wanted).to(start.device), residuals.gather(-1, wanted), size)
        if found.residuals.max() <= tolerance:
            break
    return found


def _spaces(multiply: Multiply, start: Tensor, first_check: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Krylov spaces, each larger than the last, up to `LARGEST_SPACE`: a basis, and the operator projected onto it.

    The basis (..., N, size) is orthonormal. The projected operator (..., size + width, size) holds the coefficients of
    its products with the basis, in the basis and the block that follows it. It is on the CPU.
    """
    width = start.size(-1)
    largest = min(LARGEST_SPACE, start.size(-2)) // width * width
    basis, _ = torch.linalg.qr(start)
    projected = start.new_zeros(*start.shape[:-2], largest + width, largest)
    next_check = first_check
    for size in range(width, largest + width, width):
        coefficients, fresh = _orthogonalise(multiply(basis[..., -width:]), basis)
        projected[..., : size + width, size - width : size] = coefficients
        if size >= min(next_check, largest):
            # LAPACK is faster on the CPU.
            yield basis, require_finite(projected[..., : size + width, :size].cpu(), "A")
            next_check = size + max(width, size // 4)
        basis = torch.cat([basis, fresh], dim=-1)


def _orthogonalise(block: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The block's coefficients, and an orthonormal block that extends the basis."""
    inside = block.new_zeros(*block.shape[:-2], basis.size(-1), block.size(-1))
    outside = torch.eye(block.size(-1), dtype=block.dtype, device=block.device)
    # Twice for accuracy, and a third time because QR fills a block that adds nothing new with arbitrary vectors.
    for _ in range(3):
        along = basis.mT @ block
        inside = inside + along @ outside
        block, triangle = torch.linalg.qr(require_finite(block - basis @ along, "A"))
        outside = triangle @ outside
    return torch.cat([inside, outside.expand(*inside.shape[:-2], -1, -1)], dim=-2), block
