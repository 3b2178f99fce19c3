"""Products by blocks of query rows, for every kernel: entries exist one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from acutance.kernels.definitions import accumulation_dtype
from acutance.kernels.heads import repeat_heads
from acutance.kernels.masks import add_mask, mask_rows, seen_keys, without_dead_rows

if TYPE_CHECKING:
    from acutance.operator import AttentionOperator

FEWEST_ROWS = 16
CPU_TILE = 2**20  # entries of a tile, all heads together: one that stays in the cache
GPU_TILE = 2**22  # one that keeps the device busy


def row_blocks(A: AttentionOperator, entries_per_row: int, rows: int | None = None) -> list[slice]:
    """Slices over the query rows such that a block of entries stays linear in the number of keys."""
    queries = A.shape[-2]
    on_cpu = A.device.type == "cpu"
    # On a device short blocks wait for their launches: one may be as large as queries and keys together.
    fewest = FEWEST_ROWS if on_cpu else max(FEWEST_ROWS, 2 * A.q.size(-1))
    rows = rows or max(fewest, (CPU_TILE if on_cpu else GPU_TILE) // max(1, entries_per_row))
    return [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def run_block(function: Callable[..., Tensor], rows: slice, *tensors: Tensor, several: bool) -> Tensor:
    """function(rows, *tensors); of several blocks none is kept for the backward pass, which recomputes it."""
    if several and needs_grad(*tensors):
        result: Tensor = checkpoint(function, rows, *tensors, use_reentrant=False)
        return result
    return function(rows, *tensors)


def stack_blocks(function: Callable[..., Tensor], blocks: list[slice], *tensors: Tensor, dim: int) -> Tensor:
    """The results of all blocks, one after the other along `dim`."""
    if len(blocks) == 1 or needs_grad(*tensors):
        several = len(blocks) > 1
        return torch.cat([run_block(function, rows, *tensors, several=several) for rows in blocks], dim)
    # Written into one buffer: many small results kept between large freed ones would fragment the heap.
    out: Tensor | None = None
    for rows in blocks:
        part = function(rows, *tensors)
        if out is None:
            shape = list(part.shape)
            shape[dim] = blocks[-1].stop
            out = part.new_empty(shape)
        out.narrow(dim, rows.start, rows.stop - rows.start).copy_(part)
    assert out is not None
    return out


def full_precision(A: AttentionOperator) -> torch.autocast:
    """Autocast off: rounded log-weights would be wrong by the size of the logits."""
    return torch.autocast(A.device.type, enabled=False)


class Tiles:
    """The operator's entries, one block of query rows at a time, in float32 or better."""

    def __init__(self, A: AttentionOperator, rows: int | None = None) -> None:
        batch, heads, _, keys = A.shape
        self.operator = A
        self.blocks = row_blocks(A, batch * heads * keys, rows)
        self.several = len(self.blocks) > 1
        dtype = accumulation_dtype(A.q, A.k)
        self.q, self.k = A.q.to(dtype), repeat_heads(A.k, heads).to(dtype)

    def log_weights(self, rows: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-weights of some rows against the keys they may see, unmasked, and their mask."""
        A = self.operator
        keys = k[..., : seen_keys(A, rows), :]
        with full_precision(A):
            return A.definition.log_weights(q[..., rows, :], keys, A.scale), mask_rows(A, rows)

    def logsumexp(self, rows: slice, q: Tensor, k: Tensor) -> Tensor:
        """Log of the row sums of the kernel; −∞ where every key is masked."""
        log_weights, mask = self.log_weights(rows, q, k)
        if mask is None:
            return log_weights.logsumexp(dim=-1)
        mask, dead = without_dead_rows(mask)
        return add_mask(log_weights, mask).logsumexp(dim=-1).masked_fill(dead.squeeze(-1), -torch.inf)

    def weights(self, rows: slice, q: Tensor, k: Tensor) -> Tensor:
        """Entries of some rows and the keys they may see: a row sums to one, a fully masked one is zero."""
        log_weights, mask = self.log_weights(rows, q, k)
        if mask is None:
            return log_weights.softmax(dim=-1)
        mask, dead = without_dead_rows(mask)
        return add_mask(log_weights, mask).softmax(dim=-1).masked_fill(dead, 0.0)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.blocks:
            yield rows, _append_zeros(self.weights(rows, self.q, self.k), self.k.size(-2), dim=-1)


def logsumexp(A: AttentionOperator) -> Tensor:
    """log Σ_j k(i, j) of every row, in float32 or better."""
    tiles = Tiles(A)
    return stack_blocks(tiles.logsumexp, tiles.blocks, tiles.q, tiles.k, dim=-1)


def apply(A: AttentionOperator, x: Tensor, dropout: float = 0.0) -> Tensor:
    """A x, in the dtype of x."""
    tiles = Tiles(A)
    values = repeat_heads(x, A.heads).to(accumulation_dtype(tiles.q, x))

    def product(rows: slice, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        weights = functional.dropout(tiles.weights(rows, q, k), dropout)
        with full_precision(A):
            return weights @ values[..., : weights.size(-1), :]

    return stack_blocks(product, tiles.blocks, tiles.q, tiles.k, values, dim=-2).to(x.dtype)


def apply_transpose(A: AttentionOperator, y: Tensor) -> Tensor:
    """Aᵀ y, in the dtype of y."""
    tiles = Tiles(A)
    values = y.to(accumulation_dtype(tiles.q, y))

    def product(rows: slice, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        weights = tiles.weights(rows, q, k)
        with full_precision(A):
            return _append_zeros(weights.mT @ values[..., rows, :], k.size(-2), dim=-2)

    total = values.new_zeros(*A.shape[:2], A.shape[-1], y.size(-1))
    for rows in tiles.blocks:
        total = total + run_block(product, rows, tiles.q, tiles.k, values, several=tiles.several)
    return total.to(y.dtype)


def diagonal(A: AttentionOperator) -> Tensor:
    """The entries A_ii of a square operator, in float32 or better."""
    tiles = Tiles(A)
    with full_precision(A):  # every token is a problem of one query and one key
        pairs = A.definition.log_weights(tiles.q.unsqueeze(-2), tiles.k.unsqueeze(-2), A.scale)
    log_weights = pairs.flatten(-3)
    if A.mask4 is not None:
        own = A.mask4.expand(-1, -1, A.shape[-2], -1).diagonal(dim1=-2, dim2=-1)
        log_weights = add_mask(log_weights, own)
    row_sums = A.logsumexp() if A.is_exponential else logsumexp(A)
    dead = row_sums == -torch.inf
    return (log_weights - row_sums.masked_fill(dead, 0.0)).exp().masked_fill(dead, 0.0)


def _append_zeros(x: Tensor, size: int, dim: int) -> Tensor:
    missing = size - x.size(dim)
    return x if missing == 0 else functional.pad(x, (0, 0) * (-dim - 1) + (0, missing))
