"""Attention with its mitigation for long sequences: one program per tile of queries, over tiles of keys.

Tiled as in FlashAttention-2 (https://arxiv.org/abs/2307.08691): a running softmax, and masks only where a tile of keys
is seen in part. Uniform averages come from `long_means`. Everything is computed in float32 from inputs of any
precision. Logarithms are to base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.long_means import mean_seen, sums_seen
from acutance.attention.kernels.long_tiles import (
    COUNTS,
    Tile,
    chosen,
    heads_at_a_time,
    hide,
    keys_in_part,
    place,
    put,
    put_facts,
    shared_heads,
    take,
    take_values,
)
from acutance.attention.kernels.packed_tiles import LOG2_E, features, kind, stand_ins, strength_of, strides
from acutance.attention.kernels.sizes import tiles_of

# By bytes of a number and width of a head. 16-bit numbers use the tensor cores; float32 does not, and needs registers.
TILES = {
    (2, 16): Tile(128, 64, 8, 3, 128),
    (2, 32): Tile(128, 64, 8, 3, 128),
    (2, 64): Tile(64, 64, 4, 3, 128),
    (2, 128): Tile(128, 64, 8, 3),
    (4, 16): Tile(64, 32, 4, 2),
    (4, 32): Tile(64, 32, 4, 2),
    (4, 64): Tile(32, 32, 4, 2),
    (4, 128): Tile(32, 16, 8, 1),
}


@triton.jit
def _attend(
    q, u, top, total, own_k, own_v, row, before, first_row, residual, begin, end, start, tokens, scale,
    MIXED: tl.constexpr, CAUSAL: tl.constexpr, PART: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to the running softmax: u and total are in units of 2^top."""
    for key in range(begin, end, KEYS):
        k = take(own_k, row, key, tokens, KEYS, WIDTH, CUT)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if PART:
            rows, keys = tl.arange(0, QUERIES) + start, tl.arange(0, KEYS) + key
            products = hide(products, rows[:, None], keys[None, :], float("-inf"), tokens, CAUSAL)
        higher = tl.maximum(top, tl.max(products, 1) * (scale * LOG2_E))
        weights = tl.exp2(products * (scale * LOG2_E) - higher[:, None])  # one fused multiply and add
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = take_values(own_v, row, before, first_row, residual, key, tokens, KEYS, WIDTH, CUT, MIXED)
        u = tl.dot(weights.to(v.dtype), v, u * shrink[:, None], input_precision=PRECISION)
        top = higher
    return u, top, total


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    qkv, first, strength, contrast, residual, sums, out, log_sums, tiles, together, at_a_time, tokens, heads, scale,
    constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, member = place(tiles, together, at_a_time)
    tile = (tiles - 1 - tile) if CAUSAL else tile
    start = tile * QUERIES
    head, batch = member % heads, (member // heads).to(tl.int64)
    own = qkv + batch * qkv_batch
    key_head, value_head = shared_heads(head // GROUP, heads, GROUP)
    own_k, own_v = own + key_head * WIDTH, own + value_head * WIDTH
    before = first + batch * first_batch + head // GROUP * WIDTH
    share = strength_of(residual, head // GROUP, 0.0, MIXED)
    q = take(own + head * WIDTH, row, start, tokens, QUERIES, WIDTH, CUT)
    u = tl.zeros((QUERIES, WIDTH), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    # The partly seen keys go first: every row sees the first of them, so that top is finite from there on.
    begin, end = keys_in_part(start, tokens, CAUSAL, QUERIES, KEYS)
    if CAUSAL or CUT:
        u, top, total = _attend(
            q, u, top, total, own_k, own_v, row, before, first_row, share, begin, end, start, tokens, scale,
            MIXED, CAUSAL, True, CUT, WIDTH, QUERIES, KEYS, PRECISION,
        )  # fmt: skip
    u, top, total = _attend(
        q, u, top, total, own_k, own_v, row, before, first_row, share, 0, begin, start, tokens, scale,
        MIXED, CAUSAL, False, False, WIDTH, QUERIES, KEYS, PRECISION,
    )  # fmt: skip
    u = u / total[:, None]
    if CORRECTED or CONTRAST:
        own_w = take_values(own_v, row, before, first_row, share, start, tokens, QUERIES, WIDTH, CUT, MIXED)
    if CONTRAST:
        sharper = tl.load(contrast + head).to(tl.float32)
        own_sums = sums + (batch * (heads // GROUP) + head // GROUP) * (tiles if CAUSAL else 1) * WIDTH
        u = sharper * u + (1.0 - sharper) * mean_seen(own_sums, tile, own_w, start, tokens, CAUSAL, PRECISION)
    if CORRECTED:
        pull = take(before, first_row, start, tokens, QUERIES, WIDTH, CUT).to(tl.float32)
        pull -= own_w.to(tl.float32)
        u += strength_of(strength, head, constant, LEARNT) * pull
    step = heads * WIDTH
    put(out + batch * tokens * step + head * WIDTH, step, start, tokens, u, QUERIES, WIDTH, CUT)
    put_facts(log_sums + member.to(tl.int64) * tokens, start, tokens, top + tl.log2(total), QUERIES, CUT)


def forward(
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    contrast: Tensor | None,
    residual: Tensor | None,
    constant: float,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """u (batch, tokens, heads · width) from q, k and v side by side, and the rows' log-sums for the backward pass.

    Args:
        qkv: (batch, tokens, (heads + 2 · kv_heads) · width), the last dimension contiguous.
        first: v⁰ (batch, tokens, kv_heads · width); None leaves the correction and the mixing out.
        strength: λ of each head; None where it is `constant`.
        contrast: c of each head; None is 1.
        residual: ρ of each head of the values; None mixes nothing.
        constant: λ of all heads.
        heads: of the queries.
        kv_heads: of the keys and values, each for as many heads of the queries.
        scale: of the dot product, above 0.
        causal: whether a token sees only itself and earlier ones.
        tile: instead of the one in `TILES`.
    """
    batch, tokens, packed = qkv.shape
    width = packed // (heads + 2 * kv_heads)
    tile = tile or chosen(TILES, qkv, width, plain=contrast is None and residual is None)
    out = qkv.new_empty(batch, tokens, heads * width)
    log_sums = torch.empty(batch, heads, tokens, dtype=torch.float32, device=qkv.device)
    tiles = tiles_of(tokens, tile.queries)
    sums = log_sums
    if contrast is not None:
        sums = sums_seen(qkv, first, residual, kv_heads, width, tile.queries, causal)
    read_again = 2 * tokens * width * qkv.element_size() * kv_heads // heads
    _forward[(tiles * batch * heads,)](
        qkv,
        *stand_ins(qkv, first, strength),
        *stand_ins(qkv, contrast, residual),
        sums,
        out,
        log_sums,
        *(tiles, batch * heads, heads_at_a_time(batch * heads, read_again)),
        *(tokens, heads, scale, constant),
        *strides(qkv, first),
        **features(contrast, residual, heads, kv_heads),
        CUT=tokens % tile.queries != 0,
        **kind(qkv, first, strength, width, causal, constant),
        **tile.options(),
    )
    return out, log_sums
