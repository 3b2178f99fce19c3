"""The row sums that energy and entropy need, in one pass over 16-bit queries, keys and tokens.

For row i: log Σ_j exp(s_ij), the entropy −Σ_j A_ij log A_ij and the energy Σ_j A_ij ‖u_i − u_j‖². They are made tile by
tile as in flash attention, in float32 but for the inputs, and entries of A are never written. The tensor cores get q
and k unchanged, and the tokens minus their mean as the sum of two 16-bit numbers. It is not differentiable. Where it is
not available, the operator's tiles and products give the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from acutance.attention.kernels import packed
from acutance.attention.kernels.tracing import is_watched
from acutance.attention.products import needs_grad

if TYPE_CHECKING:
    from acutance.attention.operator import AttentionOperator

ENABLED = True  # tests switch it off, to compare with what is computed without it
DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 128  # of a head: wider tiles do not fit beside each other


class RowSums(NamedTuple):
    """Sums of every row (batch, heads, queries), in float32."""

    sums: Tensor  # (2 or 3, batch, heads, queries)

    @property
    def log_sums(self) -> Tensor:
        """log Σ_j exp(s_ij); −∞ for a row that sees nothing."""
        return self.sums[0]

    @property
    def entropies(self) -> Tensor:
        """−Σ_j A_ij log A_ij, in nats; 0 for a row that sees nothing."""
        return self.sums[1]

    @property
    def energies(self) -> Tensor:
        """Σ_j A_ij ‖u_i − u_j‖²; 0 for a row that sees nothing. Only if tokens were given."""
        return self.sums[2]


def is_available(A: AttentionOperator, u: Tensor | None = None) -> bool:
    """Whether the kernel takes this operator, and tokens u (batch, heads or fewer, tokens, channels) with it."""
    inputs = [A.q, A.k] if u is None else [A.q, A.k, u]
    return (
        ENABLED
        and packed.runs_on(A.q)
        and A.q.dtype in DTYPES
        and A.kernel in ("softmax", "symmetric")
        and A.softcap is None
        and (A.sink is None or u is None)
        and (A.mask4 is None or A.mask4.dtype == torch.bool)
        and (not A.causal or A.shape[-2] == A.shape[-1])
        and all(x.dtype == A.q.dtype and x.size(-1) <= WIDEST and x.stride(-1) == 1 for x in inputs)
        and not needs_grad(*inputs)
    )


def row_sums(A: AttentionOperator, u: Tensor | None = None, counted: Tensor | None = None) -> RowSums:
    """The sums of all rows. Those of A alone are remembered, so that energy and entropy take one pass.

    Args:
        A: an operator that the kernel takes.
        u: tokens (batch, heads or fewer, tokens, channels) for the energy, as many as keys and queries.
        counted: bool (batch, tokens), the tokens whose mean is subtracted from u, None for all. The mean cancels in all
            differences and only improves their rounding, so any will do.
    """
    versions = _versions(A)
    if u is None and A.remembered is not None and versions is not None and A.remembered[0] == versions:
        return RowSums(A.remembered[1])
    sums: Tensor = (attention_sums if is_watched(A.q) else _sums)(A.q, A.k, A.mask4, u, counted, A.scale, A.causal)
    A.remembered = None if versions is None else (versions, sums)
    return RowSums(sums)


def _versions(A: AttentionOperator) -> tuple[int, ...] | None:
    """The versions of queries, keys and mask, which count writes; None where torch does not count."""
    tensors = [x for x in (A.q, A.k, A.mask) if x is not None]
    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
        return None
    return tuple(x._version for x in tensors)


def _sums(
    q: Tensor, k: Tensor, mask: Tensor | None, u: Tensor | None, counted: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """Log-sums, entropies and, where tokens u are given, energies (2 or 3, batch, heads, queries)."""
    from acutance.attention.kernels import attention_sums_tiles

    return attention_sums_tiles.forward(q, k, mask, u, counted, scale, causal)


attention_sums = torch.library.custom_op("acutance::attention_sums", _sums, mutates_args=())


@attention_sums.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor | None, u: Tensor | None, counted: Tensor | None, scale: float, causal: bool
) -> Tensor:
    return q.new_empty(2 if u is None else 3, *q.shape[:3], dtype=torch.float32)
