"""The eigenvalues of A that compete with μ = 1, padding left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acutance.explain.quotient import Quotient
from acutance.kernels import krylov
from acutance.kernels.definitions import accumulation_dtype
from acutance.kernels.spectral import DENSE_TOKENS
from acutance.operator import AttentionOperator
from acutance.spectral_theory import growth, other_eigenvalues


def competitors(A: AttentionOperator, points: Sequence[Tensor], valid: Tensor | None = None) -> Tensor:
    """The μ other than 1 that can dominate beside given λ, complex (batch, heads, m).

    Up to 512 tokens and for a causal A that is every other μ. Above, without the matrix: for each set of λ the μ with
    the largest |1 + λμ|, and the μ of smallest real part.

    Args:
        A: attention.
        points: sets of λ, each (heads or 1, k).
        valid: (batch, tokens), False where there is padding: A is restricted to the others.
    """
    if valid is None or bool(valid.all()):
        return _unpadded(A, points)
    found = [_unpadded(_one_sample(A, sample, keep), points) for sample, keep in enumerate(valid)]
    most = max(values.shape[-1] for values in found)
    # Repeating one that is there fills the row and changes no maximum.
    rows = [torch.cat([v, v[..., -1:].expand(*v.shape[:-1], most - v.shape[-1])], dim=-1) for v in found]
    return torch.cat(rows)


def _unpadded(A: AttentionOperator, points: Sequence[Tensor]) -> Tensor:
    if A.shape[-1] <= DENSE_TOKENS or A.causal:
        return other_eigenvalues(A.eigenvalues())
    return _by_products(A, points)


def _by_products(A: AttentionOperator, points: Sequence[Tensor]) -> Tensor:
    precise = A.to(accumulation_dtype(A.q, A.k))
    quotient = Quotient(A.shape[-1], precise.dtype, A.device)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(*A.shape[:2], A.shape[-1] - 1, krylov.BLOCK, generator=generator, dtype=precise.dtype)
    lam = [p.cpu() for p in points]  # where the Ritz values are

    def dominating(values: Tensor) -> Tensor:
        gains = [growth(p[..., :, None] * values[..., None, :]).amax(-2) for p in lam]
        return torch.stack([values.real.argmin(-1), *(gain.argmax(-1) for gain in gains)], dim=-1)

    def multiply(block: Tensor) -> Tensor:
        return quotient.drop(precise @ quotient.lift(block))

    return krylov.arnoldi_eigenvalues(multiply, start.to(A.device), dominating, count=1 + len(points))


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
    return A._like(q, k, mask, kernel=A.kernel)


def visible_keys(A: AttentionOperator) -> Tensor | None:
    """(batch, tokens), True for tokens that some token sees; None if nothing is masked. The others are padding."""
    if A.mask4 is None:
        return None
    mask = A.mask4 if A.mask4.dtype == torch.bool else A.mask4 > torch.finfo(A.mask4.dtype).min / 2
    return mask.any(-2).any(1).expand(A.shape[0], A.shape[-1])
