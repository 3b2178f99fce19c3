"""The eigenvalues of H and of A that can decide which family dominates, from products alone where matrices are large.

|1 + λμ| is convex in λ, and so are the smallest and the largest real part. So only the corners of the spectrum's convex
hull can decide. These are the outermost eigenvalues, which Arnoldi iteration finds first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from acutance.attention import spectra
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import accumulation_dtype
from acutance.attention.spectra import DENSE_TOKENS
from acutance.errors import AcutanceWarning
from acutance.explain.spectral_theory import growth, other_eigenvalues

ROUNDING = 100  # how many times a dtype's precision a residual may be, as a share of the rms of H's singular values


def convex_hull(eigenvalues: NDArray[np.complex128]) -> Tensor:
    """The corners of each row's convex hull (rows, k); short rows repeat one."""
    hulls = [row[hull_indices(row)].tolist() for row in eigenvalues]
    longest = max(len(hull) for hull in hulls)
    return torch.tensor([hull + hull[-1:] * (longest - len(hull)) for hull in hulls], dtype=torch.complex128)


def hull_indices(points: NDArray[np.complex128]) -> list[int]:
    """The indices of the corners, by Andrew's monotone chain: lower and upper boundary, each turning one way only."""
    _, first = np.unique(points, return_index=True)  # sorted by real part, then by imaginary part
    ordered: list[int] = first.tolist()
    if len(ordered) <= 2:
        return ordered
    boundary: list[int] = []
    for chain in (ordered, ordered[::-1]):
        side: list[int] = []
        for i in chain:
            while len(side) > 1 and _turn(*points[[*side[-2:], i]]) <= 0:
                side.pop()
            side.append(i)
        boundary += side[:-1]
    return boundary


def _turn(a: complex, b: complex, c: complex) -> float:
    return ((b - a).conjugate() * (c - a)).imag


def arnoldi_hull(projection: Tensor, value: Tensor, *, layer: int) -> tuple[NDArray[np.complex128], float]:
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
    # One vector at a time: a block finds repeated eigenvalues, which a maximum has no use for, but reaches a lower
    # power of H with as many vectors.
    found = spectra.arnoldi(
        lambda x: left @ (right @ x) / size,
        start,
        lambda values: torch.tensor(hull_indices(values.numpy())),
        16,
        tolerance,
    )
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


class OtherEigenvalues(NamedTuple):
    """Eigenvalues of A other than 1, and how well each is known."""

    values: Tensor  # complex (batch, heads, m)
    residuals: Tensor  # (batch, heads, m): ‖Az − μz‖ of each one's unit vector z; 0 if the matrix gave them
    tolerance: float = 0.0  # what the residuals should be


def other_eigenvalues_of(
    A: AttentionOperator, points: Sequence[Tensor], valid: Tensor | None = None
) -> OtherEigenvalues:
    """The μ other than 1 that can dominate beside given λ, sets of (heads or 1, k) each.

    Up to 512 tokens and for a triangular A that is every other μ. Above, without the matrix: the μ of smallest real
    part, that of largest modulus, and for each set of λ the one with the largest |1 + λμ|. Where `valid` (batch,
    tokens) is False there is padding: A is restricted to the other tokens.
    """
    A.require_row_sums_of_one("the verdict on a layer")
    is_padded = valid is not None and not bool(valid.all())
    # Among long samples with masks of their own, some may be triangular and others not.
    is_mixed = A.mask4 is not None and A.mask4.size(0) > 1 and A.shape[-1] > DENSE_TOKENS and not A.is_triangular
    if not is_padded and not is_mixed:
        return _unpadded(A, points)
    if valid is None:
        valid = torch.ones(A.shape[0], A.shape[-1], dtype=torch.bool, device=A.device)
    found = [_unpadded(_one_sample(A, sample, keep), points) for sample, keep in enumerate(valid)]
    most = max(one.values.shape[-1] for one in found)
    # Repeating a μ fills a short row and changes no maximum.
    values, residuals = (
        torch.cat([part[..., torch.arange(most, device=A.device).clamp(max=part.shape[-1] - 1)] for part in parts])
        for parts in ([one.values for one in found], [one.residuals for one in found])
    )
    return OtherEigenvalues(values, residuals, max(one.tolerance for one in found))


def _unpadded(A: AttentionOperator, points: Sequence[Tensor]) -> OtherEigenvalues:
    if A.shape[-1] <= DENSE_TOKENS or A.is_triangular:
        others = other_eigenvalues(A.eigenvalues())
        return OtherEigenvalues(others, torch.zeros_like(others.real))
    precise = A.to(accumulation_dtype(A.q, A.k))
    multiply = without_constant_mode(precise)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(*A.shape[:2], A.shape[-1] - 1, spectra.BLOCK, generator=generator, dtype=precise.dtype)
    lam = [p.cpu() for p in points]  # where the Ritz values are

    def dominating(values: Tensor) -> Tensor:
        gains = [growth(p[..., :, None] * values[..., None, :]).amax(-2) for p in lam]
        return torch.stack([values.real.argmin(-1), values.abs().argmax(-1), *(g.argmax(-1) for g in gains)], dim=-1)

    tolerance = torch.finfo(start.dtype).eps ** (2 / 3)
    found = spectra.arnoldi(multiply, start.to(A.device), dominating, 2 + len(points), tolerance)
    return OtherEigenvalues(found.values, found.residuals.to(A.device), tolerance)


def without_constant_mode(A: AttentionOperator) -> Callable[[Tensor], Tensor]:
    """A on tokens up to a constant token, in coordinates (..., N − 1, C).

    Constant tokens stay constant under every A. So A acts on these coordinates too, with all its eigenvalues but the
    one of constant tokens: μ = 1 is gone, once, without being found first.
    """
    # The reflection that exchanges the constant unit vector and the first axis.
    normal = torch.full((A.shape[-1], 1), A.shape[-1] ** -0.5, dtype=A.dtype, device=A.device)
    normal[0] -= 1
    normal = normal / normal.norm().clamp_min(torch.finfo(A.dtype).tiny)

    def reflect(x: Tensor) -> Tensor:
        reflected: Tensor = x - 2 * normal * (normal.mT @ x)
        return reflected

    return lambda y: reflect(A @ reflect(F.pad(y, (0, 0, 1, 0))))[..., 1:, :]


def _one_sample(A: AttentionOperator, sample: int, keep: Tensor) -> AttentionOperator:
    """Attention among the kept tokens of one sample: no row of theirs takes anything from the others."""
    chosen = slice(sample, sample + 1)
    k = A.k[chosen, :, keep]
    q = k if A.q is A.k else A.q[chosen, :, keep]
    mask = A.mask4
    if mask is not None:
        mask = mask[chosen] if mask.size(0) > 1 else mask
        mask = mask[..., keep, :] if mask.size(-2) > 1 else mask
        mask = mask[..., keep] if mask.size(-1) > 1 else mask
    return A.replace(q=q, k=k, mask=mask)


def visible_keys(A: AttentionOperator) -> Tensor | None:
    """(batch, tokens), True for tokens that some token sees; None if nothing is masked. The others are padding."""
    if A.mask4 is None:
        return None
    mask = A.mask4 if A.mask4.dtype == torch.bool else A.mask4 > torch.finfo(A.mask4.dtype).min / 2
    return mask.any(-2).any(1).expand(A.shape[0], A.shape[-1])
