"""Uniform averages U w over the tokens that a token sees, for long sequences.

Sums over whole tiles are made once for all programs. A causal token sees the tiles before its own and a part of its
own. The tiles before are one row of sums, which is read instead of the values themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.long_tiles import take
from acutance.attention.kernels.packed_tiles import mean_of_earlier
from acutance.attention.kernels.sizes import tiles_of

CHUNK = 64  # tiles summed at a time


@triton.jit
def _sum_tiles(x, into, tokens, heads, x_batch, x_row, DIVIDED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of one tile of rows. If DIVIDED, each row is divided by the number of tokens it sees."""
    tile, member = tl.program_id(0), tl.program_id(1)
    start, batch = tile * SIZE, (member // heads).to(tl.int64)
    rows = take(x + batch * x_batch + member % heads * WIDTH, x_row, start, tokens, SIZE, WIDTH, True).to(tl.float32)
    if DIVIDED:
        rows = rows / (tl.arange(0, SIZE) + start + 1)[:, None]
    place = (member.to(tl.int64) * tl.num_programs(0) + tile) * WIDTH
    tl.store(into + place + tl.arange(0, WIDTH), tl.sum(rows, 0))


@triton.jit
def _sum_before(sums, tiles, BACKWARDS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Replace each tile's sum by that of all tiles before it or, BACKWARDS, behind it.

    torch.cumsum is not deterministic on a GPU.
    """
    own = sums + tl.program_id(0).to(tl.int64) * tiles * WIDTH
    carried = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, tiles, CHUNK):
        rank = tl.arange(0, CHUNK) + begin
        tile = (tiles - 1 - rank) if BACKWARDS else rank
        places, there = own + tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], (rank < tiles)[:, None]
        x = tl.load(places, mask=there, other=0.0)
        tl.store(places, tl.cumsum(x, 0) - x + carried[None, :], mask=there)
        carried += tl.sum(x, 0)


def _running(sums: Tensor, backwards: bool) -> Tensor:
    """`_sum_before` of sums (batch, heads, tiles, width), in place."""
    batch, heads, tiles, width = sums.shape
    _sum_before[(batch * heads,)](sums, tiles, BACKWARDS=backwards, CHUNK=CHUNK, WIDTH=width)
    return sums


def _tile_sums(x: Tensor, heads: int, size: int, divided: bool = False) -> Tensor:
    """The sums of every `size` tokens of x (batch, tokens, heads · width), as (batch, heads, tiles, width)."""
    batch, tokens, all_heads = x.shape
    tiles, width = tiles_of(tokens, size), all_heads // heads
    sums = torch.empty(batch, heads, tiles, width, dtype=torch.float32, device=x.device)
    _sum_tiles[(tiles, batch * heads)](
        x, sums, tokens, heads, x.stride(0), x.stride(1), DIVIDED=divided, SIZE=size, WIDTH=width
    )
    return sums


def sums_seen(
    qkv: Tensor, first: Tensor | None, residual: Tensor | None, kv_heads: int, width: int, size: int, causal: bool
) -> Tensor:
    """The sum of the mixed values w before each tile of `size` queries; without causality, the sum of all of them."""
    sums = _tile_sums(qkv[..., -kv_heads * width :], kv_heads, size)
    if residual is not None and first is not None:
        sums = sums + residual[:, None, None] * (_tile_sums(first, kv_heads, size) - sums)
    if causal:
        return _running(sums, backwards=False)
    return sums.sum(2, keepdim=True)


def sums_owed(grad: Tensor, contrast: Tensor, heads: int, kv_heads: int, size: int, causal: bool) -> Tensor:
    """(1 − c) Uᵀ du of each tile of `size` keys, from the queries of later tiles or, without causality, from all.

    It is summed over the query heads that share the keys.
    """
    shares = _tile_sums(grad, heads, size, divided=causal)
    later = _running(shares, backwards=True) if causal else shares.sum(2, keepdim=True) / grad.shape[1]
    owed: Tensor = (1 - contrast.float())[:, None, None] * later
    return owed.reshape(len(grad), kv_heads, heads // kv_heads, *later.shape[2:]).sum(2)


@triton.jit
def mean_seen(sums, tile, own, start, tokens, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """U w of a tile of queries, from `sums_seen` and the tile's own values; one row where all see the same."""
    columns = tl.arange(0, own.shape[1])
    if CAUSAL:
        return mean_of_earlier(own, tl.load(sums + tile * own.shape[1] + columns), start, PRECISION)
    else:
        return (tl.load(sums + columns) / tokens)[None, :]


@triton.jit
def owed_within(du, start, PRECISION: tl.constexpr):
    """Uᵀ du of a tile of keys from the queries of the same tile, each of which sees itself and earlier tokens."""
    rows = tl.arange(0, du.shape[0])
    later = (rows[None, :] >= rows[:, None]).to(du.dtype)
    shares = (du.to(tl.float32) / (rows + start + 1)[:, None]).to(du.dtype)
    return tl.dot(later, shares, input_precision=PRECISION)
