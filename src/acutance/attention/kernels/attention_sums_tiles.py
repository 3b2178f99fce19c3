"""The kernels of `attention_sums`: tokens minus their mean in two parts, then one pass over tiles of queries and keys.

Logarithms are to base 2 until they are written. A logit is relative to the largest of its row so far, so the entropy
log Σ_j w_j − Σ_j w_j (s_j − top) / Σ_j w_j is a difference of small numbers. Distances are computed pair by pair,
‖x_i‖² + ‖x_j‖² − 2 x_i·x_j, and weighted in float32, because weights rounded to 16 bits would spoil the energy.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.launching import Launch, is_current, placement
from acutance.attention.kernels.long_tiles import (
    COUNTS,
    Tile,
    heads_at_a_time,
    keys_in_part,
    place,
    put_facts,
    take_facts,
)
from acutance.attention.kernels.packed_tiles import LOG2_E
from acutance.attention.kernels.sizes import power_of_two, tiles_of

LOWEST = tl.constexpr(-1e30)  # below every logit: where a row's largest starts
HIDDEN = tl.constexpr(-1e36)  # a far lower logit, but finite: times its weight of zero it is zero
ROWS = 64  # tokens centred at a time

# By the width of a head, a power of two, and whether there is a mask, which needs registers.
TILES = {(width, masked): Tile(64, 32 if masked else 64, 4, 2) for width in (16, 32, 64) for masked in (False, True)}
TILES |= {(128, masked): Tile(128, 32 if masked else 64, 8, 2) for masked in (False, True)}
TILES[64, False] = Tile(64, 64, 4, 3)  # fastest of seven on an H200 at 2048 tokens; at 197 noise hides which


@triton.jit
def _take(
    base, stride, start, count,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The rows from `start` on, padded with zeros to COLUMNS; rows beyond the last are zero too."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, COLUMNS)
    places = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if CUT:
        return tl.load(places, mask=(rows[:, None] + start < count) & (columns[None, :] < WIDTH), other=0.0)
    elif WIDTH < COLUMNS:
        return tl.load(places, mask=columns[None, :] < WIDTH, other=0.0)
    else:
        return tl.load(places)


@triton.jit
def _put(
    base, start, count, tile, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write contiguous rows."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, COLUMNS)
    places = base + tl.cast(start, tl.int64) * WIDTH + (rows[:, None] * WIDTH + columns[None, :])
    tl.store(places, tile, mask=(rows[:, None] + start < count) & (columns[None, :] < WIDTH))


@triton.jit
def _centre(
    u, counted, parts, squares, low_part, tokens, heads, largest, batch_step, head_step, row, counted_batch,
    counted_row,
    COUNTED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One head's tokens minus their mean as high + low, and ‖high‖² + 2 high·low.

    The mean is rounded to 16 bits: then two 16-bit numbers hold the difference, nearly always exactly.
    """
    member = tl.program_id(0).to(tl.int64)
    own = u + member // heads * batch_step + member % heads * head_step
    total = tl.zeros((COLUMNS,), tl.float32)
    farthest = tl.zeros((COLUMNS,), tl.float32)
    number = 0.0
    for start in range(0, tokens, SIZE):
        x = _take(own, row, start, tokens, SIZE, WIDTH, COLUMNS, True).to(tl.float32)
        rows = tl.arange(0, SIZE) + start
        inside = rows < tokens
        if COUNTED:
            marks = counted + member // heads * counted_batch + rows * counted_row
            inside = tl.load(marks, mask=inside, other=0) != 0
        total += tl.sum(tl.where(inside[:, None], x, 0.0), 0)
        farthest = tl.maximum(farthest, tl.max(tl.abs(x), 0))
        number += tl.sum(inside.to(tl.float32), 0)
    mean = (total / tl.maximum(number, 1.0)).to(u.dtype.element_ty).to(tl.float32)
    mean = tl.where(farthest + tl.abs(mean) > largest, 0.0, mean)  # the difference would be out of range
    for start in range(0, tokens, SIZE):
        x = _take(own, row, start, tokens, SIZE, WIDTH, COLUMNS, True).to(tl.float32) - mean[None, :]
        upper = x.to(u.dtype.element_ty)
        lower = (x - upper.to(tl.float32)).to(u.dtype.element_ty)
        _put(parts + member * tokens * WIDTH, start, tokens, upper, SIZE, WIDTH, COLUMNS)
        _put(parts + low_part + member * tokens * WIDTH, start, tokens, lower, SIZE, WIDTH, COLUMNS)
        upper, lower = upper.to(tl.float32), lower.to(tl.float32)
        square = tl.sum(upper * (upper + 2.0 * lower), 1)
        put_facts(squares + member * tokens, start, tokens, square, SIZE, True)


@triton.jit
def _seen(
    mask, start, key, queries, count, mask_row, mask_key,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Which keys from `key` on each row from `start` on may see."""
    rows, keys = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    seen = keys + key < count
    if CAUSAL:
        seen = seen & (keys + key <= rows + start)
    if MASKED:
        corner = mask + tl.cast(start, tl.int64) * mask_row + tl.cast(key, tl.int64) * mask_key
        inside = (rows + start < queries) & (keys + key < count)
        seen = seen & (tl.load(corner + (rows * mask_row + keys * mask_key), mask=inside, other=0) != 0)
    return seen


@triton.jit
def _scan(
    q, high, low, square, top, total, gaps, energy, own_k, own_high, own_low, own_squares, own_mask, row, mask_row,
    mask_key, begin, end, start, queries, count, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PART: tl.constexpr, ENERGY: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to the running sums, which are in units of 2^top."""
    for key in range(begin, end, KEYS):
        k = _take(own_k, row, key, count, KEYS, WIDTH, COLUMNS, PART)
        logits = tl.dot(q, tl.trans(k)) * factor
        if PART or MASKED:
            seen = _seen(own_mask, start, key, queries, count, mask_row, mask_key, CAUSAL, MASKED, QUERIES, KEYS)
            logits = tl.where(seen, logits, HIDDEN)
        higher = tl.maximum(top, tl.max(logits, 1))
        gap = logits - higher[:, None]
        weights = tl.exp2(gap)
        shrink = tl.exp2(top - higher)
        gaps = shrink * (gaps + total * (top - higher)) + tl.sum(weights * gap, 1)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        if ENERGY:
            other_high = _take(own_high, CHANNELS, key, count, KEYS, CHANNELS, PLACES, PART)
            other_low = _take(own_low, CHANNELS, key, count, KEYS, CHANNELS, PLACES, PART)
            inner = tl.dot(high, tl.trans(other_high))
            inner = tl.dot(high, tl.trans(other_low), inner)
            inner = tl.dot(low, tl.trans(other_high), inner)
            others = take_facts(own_squares, key, count, 0.0, KEYS, PART)
            distance = square[:, None] + others[None, :] - 2.0 * inner
            if PART or MASKED:
                distance = tl.where(seen, distance, 0.0)  # hidden tokens may be NaN
            energy = energy * shrink + tl.sum(weights * distance, 1)
    return top, total, gaps, energy


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    q, k, mask, parts, squares, sums, low_part, tiles, together, at_a_time, queries, count, heads, key_heads,
    token_heads, factor, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_key,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ENERGY: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr, CUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, member = place(tiles, together, at_a_time)
    start = ((tiles - 1 - tile) if CAUSAL else tile) * QUERIES  # the longest rows first
    head, batch = (member % heads).to(tl.int64), (member // heads).to(tl.int64)
    own_k = k + batch * k_batch + head // (heads // key_heads) * k_head
    own_mask = mask + batch * mask_batch + head * mask_head
    own_tokens = (batch * token_heads + head // (heads // token_heads)) * count
    own_high, own_squares = parts + own_tokens * CHANNELS, squares + own_tokens
    own_low = own_high + low_part
    queried = _take(q + batch * q_batch + head * q_head, q_row, start, queries, QUERIES, WIDTH, COLUMNS, CUT)
    top = tl.full((QUERIES,), LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    gaps = tl.zeros((QUERIES,), tl.float32)
    energy = tl.zeros((QUERIES,), tl.float32)
    if ENERGY:
        upper = _take(own_high, CHANNELS, start, count, QUERIES, CHANNELS, PLACES, CUT)
        lower = _take(own_low, CHANNELS, start, count, QUERIES, CHANNELS, PLACES, CUT)
        square = take_facts(own_squares, start, count, 0.0, QUERIES, CUT)
    else:
        upper, lower, square = queried, queried, total  # not read
    begin, end = keys_in_part(start, count, CAUSAL, QUERIES, KEYS)
    top, total, gaps, energy = _scan(
        queried, upper, lower, square, top, total, gaps, energy, own_k, own_high, own_low, own_squares, own_mask, k_row,
        mask_row, mask_key, 0, begin, start, queries, count, factor,
        CAUSAL, MASKED, False, ENERGY, WIDTH, COLUMNS, CHANNELS, PLACES, QUERIES, KEYS,
    )  # fmt: skip
    top, total, gaps, energy = _scan(
        queried, upper, lower, square, top, total, gaps, energy, own_k, own_high, own_low, own_squares, own_mask, k_row,
        mask_row, mask_key, begin, end, start, queries, count, factor,
        CAUSAL, MASKED, True, ENERGY, WIDTH, COLUMNS, CHANNELS, PLACES, QUERIES, KEYS,
    )  # fmt: skip
    sees = total != 0
    share = 1.0 / tl.where(sees, total, 1.0)
    log_total = tl.log2(tl.where(sees, total, 1.0))
    own_sums, step = sums + member.to(tl.int64) * queries, together.to(tl.int64) * queries
    log_sum = tl.where(sees, (top + log_total) / LOG2_E, float("-inf"))
    entropy = (log_total - gaps * share) / LOG2_E
    put_facts(own_sums, start, queries, log_sum, QUERIES, CUT)
    put_facts(own_sums + step, start, queries, tl.where(entropy < 0, 0.0, entropy), QUERIES, CUT)
    if ENERGY:
        put_facts(own_sums + 2 * step, start, queries, tl.where(energy < 0, 0.0, energy * share), QUERIES, CUT)


class _Kind(NamedTuple):
    """What decides which code is compiled for an operator."""

    queries: tuple[int, ...]  # the shapes of q, k and tokens
    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    has_tokens: bool
    masked: bool
    counted: bool
    causal: bool
    tile: Tile | None


class _Plan(NamedTuple):
    """The two launches, made once like those of `token_sums`."""

    low_part: int  # where the low parts begin
    largest: float  # finite number of the tokens' dtype
    tiles: int
    at_a_time: int
    centre: Launch
    forward: Launch


@lru_cache(256)
def _plan(kind: _Kind, dtype: torch.dtype, *_compiled_for: object) -> _Plan:
    """Strides and placement only tell cached plans apart."""
    batch, heads, queries, width = kind.queries
    token_heads, channels = kind.tokens[1], kind.tokens[3]
    columns, places = (max(16, power_of_two(size)) for size in (width, channels))
    tile = kind.tile or TILES[max(columns, places), kind.masked]
    tiles = tiles_of(queries, tile.queries)
    centre = {"COUNTED": kind.counted, "WIDTH": channels, "COLUMNS": places, "SIZE": ROWS, "num_warps": 4}
    scan = {
        "CAUSAL": kind.causal,
        "MASKED": kind.masked,
        "ENERGY": kind.has_tokens,
        "WIDTH": width,
        "COLUMNS": columns,
        "CHANNELS": channels,
        "PLACES": places,
        "CUT": queries % tile.queries != 0,
    }
    read_again = 2 * kind.keys[2] * (width + 2 * channels)  # bytes of 16-bit numbers
    return _Plan(
        prod(kind.tokens),
        torch.finfo(dtype).max,
        tiles,
        heads_at_a_time(batch * heads, read_again),
        Launch(_centre, (batch * token_heads,), centre),
        Launch(_forward, (tiles * batch * heads,), scan | tile.options()),
    )


def forward(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    u: Tensor | None,
    counted: Tensor | None,
    scale: float,
    causal: bool,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Log-sums, entropies and, where tokens u are given, energies (2 or 3, batch, heads, queries).

    Args:
        q: (batch, heads, queries, width), the last dimension contiguous.
        k: (batch, key heads, keys, width), likewise.
        mask: bool, True where a key is seen; broadcasts to (batch, heads, queries, keys).
        u: (batch, token heads, keys, channels) likewise, with as many queries as keys; None leaves the energies out.
        counted: bool (batch, keys), the tokens whose mean is subtracted from u; None for all.
        scale: of the dot product.
        causal: whether a token sees only itself and earlier ones; needs as many queries as keys.
        tile: instead of the one in `TILES`.
    """
    if not is_current(q.device):
        with torch.cuda.device_of(q):
            return forward(q, k, mask, u, counted, scale, causal, tile=tile)
    (batch, heads, queries, _), (key_heads, keys) = q.shape, k.shape[1:3]
    sums = torch.empty(2 if u is None else 3, batch, heads, queries, dtype=torch.float32, device=q.device)
    tokens = q if u is None else u
    seen = q if mask is None else mask.expand(batch, heads, queries, keys).view(torch.uint8)
    marks = tokens if counted is None else counted.expand(batch, keys).view(torch.uint8)
    parts, squares = q, sums  # any tensors stand in for what is not read
    if u is not None:
        parts = u.new_empty(2, *u.shape)  # high and low
        squares = torch.empty(u.shape[:3], dtype=torch.float32, device=u.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *seen.stride())
    token_strides = (*tokens.stride()[:3], *marks.stride()[:2])
    kind = _Kind(q.shape, k.shape, tokens.shape, u is not None, mask is not None, counted is not None, causal, tile)
    plan = _plan(kind, q.dtype, strides, token_strides, placement(q, k, seen, tokens, marks))
    if u is not None:
        plan.centre((u, marks, parts, squares), plan.low_part, keys, u.shape[1], plan.largest, *token_strides)
    plan.forward(
        (q, k, seen, parts, squares, sums),
        *(plan.low_part, plan.tiles, batch * heads, plan.at_a_time),
        *(queries, keys, heads, key_heads, tokens.shape[1], scale * LOG2_E.value),
        *strides,
    )
    return sums
