"""Small things the metrics ask of an attention operator."""

import torch
from torch import Tensor

from acutance.attention.operator import AttentionOperator
from acutance.metrics.tokens import valid_positions, working_dtype


def upcast_operator(A: AttentionOperator, dtype: torch.dtype | None = None) -> AttentionOperator:
    """The operator in float32 or better, and in no less than `dtype`."""
    dtype = working_dtype(torch.promote_types(A.dtype, dtype or A.dtype))
    return A if A.dtype == A.k.dtype == dtype else A.to(dtype)


def product(A: AttentionOperator, x: Tensor) -> Tensor:
    """A x in the precision of A and x, whatever autocast would prefer."""
    with torch.autocast(A.device.type, enabled=False):
        rows = A @ x
    # The flash kernel on CPU answers a NaN query with zeros, which would pass for a fully masked row.
    return torch.where(torch.isfinite(A.q).all(-1, keepdim=True), rows, torch.nan)


def query_rows(A: AttentionOperator, mask: Tensor | None) -> Tensor:
    """Which query rows count (batch, heads, queries), from a mask (batch, queries)."""
    return valid_positions(over_heads(mask), torch.Size(A.shape[:-1]), A.q)


def over_heads(mask: Tensor | None) -> Tensor | None:
    """A mask (batch, tokens) as it broadcasts over heads."""
    return None if mask is None else mask.unsqueeze(-2)
