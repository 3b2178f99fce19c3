"""Kernels φ(q)·φ(k) by associativity: φ(q)(φ(k)ᵀx) costs tokens × width², no entry of A is ever formed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.kernels.definitions import accumulation_dtype, scaled_features
from acutance.kernels.heads import repeat_heads
from acutance.kernels.tiled import full_precision

if TYPE_CHECKING:
    from acutance.operator import AttentionOperator


def is_available(A: AttentionOperator) -> bool:
    """Whether A is a product of features: no causality, and no mask beyond one of the keys."""
    return A.definition.log_features is not None and not A.causal and A.masks_keys_only


def apply(A: AttentionOperator, x: Tensor) -> Tensor:
    """A x, in the dtype of x."""
    with full_precision(A):
        query_features, key_features, row_sums, _ = _factors(A)
        values = repeat_heads(x, A.heads).to(accumulation_dtype(query_features, x))
        return (query_features @ (key_features.mT @ values) / row_sums).to(x.dtype)


def apply_transpose(A: AttentionOperator, y: Tensor) -> Tensor:
    """Aᵀ y, in the dtype of y."""
    with full_precision(A):
        query_features, key_features, row_sums, _ = _factors(A)
        return (key_features @ (query_features.mT @ (y.to(row_sums.dtype) / row_sums))).to(y.dtype)


def logsumexp(A: AttentionOperator) -> Tensor:
    """log Σ_j φ(q_i)·φ(k_j) of every row, in float32 or better."""
    with full_precision(A):
        _, key_features, row_sums, row_scale = _factors(A)
        dead = key_features.detach().sum(dim=(-2, -1)).unsqueeze(-1) == 0
        return (row_sums.log() + row_scale).squeeze(-1).masked_fill(dead, -torch.inf)


def _factors(A: AttentionOperator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled φ(q), φ(k), the row sums of their product, and the log factor taken out of each row."""
    assert A.definition.log_features is not None
    dtype = accumulation_dtype(A.q, A.k)
    log_q = A.definition.log_features(A.q.to(dtype))
    log_k = A.definition.log_features(repeat_heads(A.k, A.heads).to(dtype))
    if A.mask4 is not None:
        log_k = log_k.masked_fill(~A.mask4.mT, -torch.inf)
    query_features, key_features, row_scale = scaled_features(log_q, log_k)
    row_sums = query_features @ key_features.sum(dim=-2, keepdim=True).mT
    # With a key in sight the sum is at least one; without any it is zero and so are the products.
    return query_features, key_features, row_sums.clamp(min=0.5), row_scale
