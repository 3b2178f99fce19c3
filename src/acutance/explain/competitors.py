"""The eigenvalues of A that compete with μ = 1, padding left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.attention import spectra
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import accumulation_dtype
from acutance.attention.spectra import DENSE_TOKENS
from acutance.explain.quotient import Quotient
from acutance.explain.spectral_theory import growth, other_eigenvalues


class Competitors(NamedTuple):
    """Eigenvalues of A other than 1, and how well each is known."""

    values: Tensor  # complex (batch, heads, m)
    residuals: Tensor  # (batch, heads, m): ‖Az − μz‖ of each one's unit vector z; 0 where the matrix gave them
    tolerance: float = 0.0  # what the residuals should be

    @property
    def smallest(self) -> Tensor:
        """μ_min, the smallest real part (batch, heads)."""
        return self.values.real.amin(-1)

    @property
    def largest(self) -> Tensor:
        """The largest |μ| (batch, heads): how slowly A alone mixes the tokens."""
        return self.values.abs().amax(-1)


def competitors(A: AttentionOperator, points: Sequence[Tensor], valid: Tensor | None = None) -> Competitors:
    """The μ other than 1 that can dominate beside given λ.

    Up to 512 tokens and for a triangular A that is every other μ. Above, without the matrix: the μ of smallest real
    part, that of largest modulus, and for each set of λ the one with the largest |1 + λμ|.

    Args:
        A: attention.
        points: sets of λ, each (heads or 1, k).
        valid: (batch, tokens), False where there is padding: A is restricted to the others.
    """
    A.require_row_sums_of_one("the verdict on a layer")
    if valid is None or bool(valid.all()):
        if not _may_differ(A):
            return _unpadded(A, points)
        valid = torch.ones(A.shape[0], A.shape[-1], dtype=torch.bool, device=A.device)
    found = [_unpadded(_one_sample(A, sample, keep), points) for sample, keep in enumerate(valid)]
    values, residuals = _stacked([one.values for one in found]), _stacked([one.residuals for one in found])
    return Competitors(values, residuals, max(one.tolerance for one in found))


def _may_differ(A: AttentionOperator) -> bool:
    """Whether some samples may be triangular and others not, and it matters."""
    return A.mask4 is not None and A.mask4.size(0) > 1 and A.shape[-1] > DENSE_TOKENS and not A.is_triangular


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Samples with different numbers of μ one below the other; repeating one fills a row and changes no maximum."""
    most = max(row.shape[-1] for row in rows)
    return torch.cat([torch.cat([r, r[..., -1:].expand(*r.shape[:-1], most - r.shape[-1])], dim=-1) for r in rows])


def _unpadded(A: AttentionOperator, points: Sequence[Tensor]) -> Competitors:
    if A.shape[-1] <= DENSE_TOKENS or A.is_triangular:
        others = other_eigenvalues(A.eigenvalues())
        return Competitors(others, torch.zeros_like(others.real))
    return _by_products(A, points)


def _by_products(A: AttentionOperator, points: Sequence[Tensor]) -> Competitors:
    precise = A.to(accumulation_dtype(A.q, A.k))
    quotient = Quotient(A.shape[-1], precise.dtype, A.device)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(*A.shape[:2], A.shape[-1] - 1, spectra.BLOCK, generator=generator, dtype=precise.dtype)
    lam = [p.cpu() for p in points]  # where the Ritz values are

    def dominating(values: Tensor) -> Tensor:
        gains = [growth(p[..., :, None] * values[..., None, :]).amax(-2) for p in lam]
        return torch.stack([values.real.argmin(-1), values.abs().argmax(-1), *(g.argmax(-1) for g in gains)], dim=-1)

    def multiply(block: Tensor) -> Tensor:
        return quotient.drop(precise @ quotient.lift(block))

    tolerance = torch.finfo(start.dtype).eps ** (2 / 3)
    found = spectra.arnoldi(multiply, start.to(A.device), dominating, 2 + len(points), tolerance)
    return Competitors(found.values, found.residuals.to(A.device), tolerance)


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
