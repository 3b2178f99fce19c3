"""Metrics of the attention matrix: how spread its rows are, how alike two matrices are.

A is an `AttentionOperator`; `mask` (batch, queries) drops query rows. Entries, where a formula needs them,
exist one block of rows at a time: memory stays linear in the number of tokens.
"""

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from acutance.attention.kernels import attention_sums
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import KERNELS, Tiles, accumulation_dtype, row_blocks
from acutance.errors import ShapeError
from acutance.metrics.sums import masked_mean, metric, ratio, safe_sqrt, valid_positions


@metric("A", "smoother", (0, inf), "How many tokens a row of attention spreads over, in nats.")
def attention_entropy(A: AttentionOperator, mask: Tensor | None = None) -> Tensor:
    """Mean entropy in nats of the rows of A (batch, heads).

    It is 0 if every row attends to one key, and log M if it attends to all M alike. Fully masked rows are skipped. A
    sink counts as one more key.
    """
    A.require_weights("attention_entropy")
    if A.sink is None and attention_sums.is_available(A):
        sums = attention_sums.row_sums(A)
        return masked_mean(sums.entropies, valid_positions(mask, A.q, heads=True) & (sums.log_sums != -torch.inf))
    A = A.to(accumulation_dtype(A.q, A.k))
    plain = A.without_sink()
    if A.is_exponential and A.softcap is None:  # another origin for the keys: smaller logits round less
        q, k = KERNELS[A.kernel].channels(A.q, A.k)
        plain = AttentionOperator(q, k - k.mean(-2, keepdim=True), mask=A.mask, causal=A.causal, scale=A.scale)
    tiles = Tiles(plain)

    def row_sums(rows: slice) -> Tensor:  # −Σ_j A_ij log A_ij and Σ_j A_ij
        weights = tiles.weights(rows)
        entropies = torch.special.entr(weights.masked_fill(weights == 0, 1))  # 0 log 0 = 0, gradient included
        return torch.stack([entropies.sum(-1), weights.sum(-1)], dim=-1)

    rows = tiles.stack(row_sums)
    entropy, sees_keys = rows[..., 0].clamp_min(0), rows[..., 1] != 0
    if A.sink is not None:
        # h(r) + r H for a row that gives r to the keys, with entropy H among them, and 1 − r to the sink.
        logit = A.logsumexp().masked_fill(~sees_keys, 0) - A.sink[:, None]
        keys = logit.sigmoid()
        entropy = keys * entropy - keys * logsigmoid(logit) - (1 - keys) * logsigmoid(-logit)
    return masked_mean(entropy, valid_positions(mask, A.q, heads=True) & sees_keys)


@metric("", "neither", (-1, 1), "How alike two layers attend: 1 when the second repeats the first.")
def attention_cosine(A: AttentionOperator, B: AttentionOperator, mask: Tensor | None = None) -> Tensor:
    """⟨A, B⟩_F / (‖A‖_F ‖B‖_F) per head (batch, heads).

    Between successive layers it shows redundancy (arXiv 2312.00751, Fig. 5). A matrix of zeros has cosine 0. Only
    matrices of both signs, as scans have, give a cosine below 0.
    """
    if A.shape != B.shape:
        raise ShapeError(f"both operators must have the same (batch, heads, queries, keys): {A.shape} and {B.shape}")
    valid, sums = valid_positions(mask, A.q, heads=True).unsqueeze(-1), torch.zeros((), device=A.device)
    rows = row_blocks(A)[0].stop
    for a, b in zip(_counted(A, valid, rows), _counted(B, valid, rows), strict=True):
        sums = sums + torch.stack([(a * b).sum((-2, -1)), a.square().sum((-2, -1)), b.square().sum((-2, -1))])
    inner, *norms = sums.unbind()
    return ratio(inner, safe_sqrt(norms[0]) * safe_sqrt(norms[1])).clamp(-1, 1)


@metric("A", "neither", (-1, 1), "How alike the heads attend: 1 when all do the same.")
def head_cosine(A: AttentionOperator, mask: Tensor | None = None) -> Tensor:
    """The mean Frobenius cosine over all pairs of heads (batch,); 1 if all heads are alike, or there is one."""
    heads, valid, gram = A.heads, valid_positions(mask, A.q, heads=True).unsqueeze(-1), torch.zeros((), device=A.device)
    if heads == 1:
        return valid.new_ones(A.shape[0], dtype=accumulation_dtype(A.q))
    with torch.autocast(A.device.type, enabled=False):
        for weights in _counted(A, valid):
            flat = weights.flatten(2)
            gram = gram + flat @ flat.mT
    norms = safe_sqrt(gram.diagonal(dim1=-2, dim2=-1))
    cosines = ratio(gram, norms.unsqueeze(-1) * norms.unsqueeze(-2))
    pairs = torch.ones(heads, heads, dtype=torch.bool, device=A.device).triu(1)
    return cosines[..., pairs].mean(-1).clamp(-1, 1)


def _counted(A: AttentionOperator, valid: Tensor, size: int | None = None) -> Iterator[Tensor]:
    """Blocks of A's rows divided by the largest row sum, with zeros in rows that do not count.

    Beside a sink that takes nearly everything, squares of the small entries would vanish.
    """
    largest = None if A.sink is None else (A.row_scale * valid).amax(-2, keepdim=True)
    for rows, weights in A.tiles(size):
        counted = weights.masked_fill(~valid[..., rows, :], 0)
        yield counted if largest is None else ratio(counted, largest)
