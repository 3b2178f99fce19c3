"""The gradients of `long_forward`: a pass over queries for dq, then one over keys for dk and dv.

One program makes each sum in a fixed order, without atomics, so the same inputs give the same gradients. The price is
that the logits are computed twice. The first pass also computes and keeps Σ du·(c·A w) of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.long_means import mean_seen, owed_within, sums_owed, sums_seen
from acutance.attention.kernels.long_tiles import (
    COUNTS,
    Tile,
    chosen,
    heads_at_a_time,
    hide,
    keys_in_part,
    place,
    put,
    shared_heads,
    take,
    take_facts,
    take_values,
)
from acutance.attention.kernels.packed_tiles import LOG2_E, features, kind, over_tiles, stand_ins, strength_of, strides
from acutance.attention.kernels.sizes import tiles_of

# By bytes of a number and width of a head. The second's queries per tile divide the first's.
QUERY_TILES = {
    (2, 16): Tile(128, 64, 8, 3, 128),
    (2, 32): Tile(128, 64, 8, 3, 128),
    (2, 64): Tile(128, 64, 8, 3, 128),
    (2, 128): Tile(128, 64, 8, 2),
    (4, 16): Tile(64, 32, 4, 2),
    (4, 32): Tile(32, 32, 4, 2),
    (4, 64): Tile(32, 32, 4, 2),
    (4, 128): Tile(16, 16, 8, 1),
}
KEY_TILES = {
    (2, 16): Tile(64, 128, 8, 3),
    (2, 32): Tile(64, 128, 8, 3),
    (2, 64): Tile(64, 64, 4, 3),
    (2, 128): Tile(32, 128, 8, 2),
    (4, 16): Tile(32, 64, 4, 2),
    (4, 32): Tile(32, 32, 4, 2),
    (4, 64): Tile(32, 32, 8, 2),
    (4, 128): Tile(16, 32, 8, 1),
}


@triton.jit
def _row_facts(
    du, made, step, beside, row, before, first_row, sums, tile, start, tokens, strength, contrast, residual,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    WIDTH: tl.constexpr, CUT: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ du·(c·A w) of each row, the rows' part of the gradient of λ, and U w's part of the gradient of c."""
    average = take(made, step, start, tokens, QUERIES, WIDTH, CUT).to(tl.float32)
    strength_grad = 0.0
    evenly = 0.0
    if CORRECTED or CONTRAST:
        own_w = take_values(beside, row, before, first_row, residual, start, tokens, QUERIES, WIDTH, CUT, MIXED)
    if CORRECTED:
        pull = take(before, first_row, start, tokens, QUERIES, WIDTH, CUT).to(tl.float32)
        pull -= own_w.to(tl.float32)
        average -= strength * pull
        if LEARNT:
            strength_grad = tl.sum(du.to(tl.float32) * pull)
    if CONTRAST:
        mean = mean_seen(sums, tile, own_w, start, tokens, CAUSAL, PRECISION)
        average -= (1.0 - contrast) * mean
        evenly = tl.sum(du.to(tl.float32) * mean)
    return tl.sum(du.to(tl.float32) * average, 1), strength_grad, evenly


@triton.jit
def _add_keys(
    q, du, log_sum, delta, dq, through, own_k, own_v, row, before, first_row, contrast, residual, begin, end, start,
    tokens, scale,
    CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, PART: tl.constexpr, CUT: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to dq, without the scale, and with a contrast to each row's Σ du·(A w).

    The latter is summed here because c may be zero, so c·A w cannot be divided by it.
    """
    for key in range(begin, end, KEYS):
        k = take(own_k, row, key, tokens, KEYS, WIDTH, CUT)
        v = take_values(own_v, row, before, first_row, residual, key, tokens, KEYS, WIDTH, CUT, MIXED)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dweights = tl.dot(du, tl.trans(v), input_precision=PRECISION)
        weights = tl.exp2(products * (scale * LOG2_E) - log_sum[:, None])
        if PART:
            rows, keys = tl.arange(0, QUERIES) + start, tl.arange(0, KEYS) + key
            weights = hide(weights, rows[:, None], keys[None, :], 0.0, tokens, CAUSAL)
        if CONTRAST:
            through += tl.sum(weights * dweights, 1)
            dweights = contrast * dweights
        dlogits = weights * (dweights - delta[:, None])
        dq = tl.dot(dlogits.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, through


@triton.jit(do_not_specialize=COUNTS)
def _backward_queries(
    qkv, first, strength, contrast, residual, sums, out, log_sums, facts, grad, grad_qkv, grad_strength, grad_contrast,
    tiles, together, at_a_time, tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the facts of its rows, and its part of the gradients of λ and c."""
    tile, member = place(tiles, together, at_a_time)
    tile = (tiles - 1 - tile) if CAUSAL else tile
    start = tile * QUERIES
    head, batch = member % heads, (member // heads).to(tl.int64)
    own, step = qkv + batch * qkv_batch, heads * WIDTH
    key_head, value_head = shared_heads(head // GROUP, heads, GROUP)
    same_place = batch * tokens * step + head * WIDTH
    own_k, own_v = own + key_head * WIDTH, own + value_head * WIDTH
    before = first + batch * first_batch + head // GROUP * WIDTH
    sharper, share = strength_of(contrast, head, 1.0, CONTRAST), strength_of(residual, head // GROUP, 0.0, MIXED)
    own_sums = sums + (batch * (heads // GROUP) + head // GROUP) * (tiles if CAUSAL else 1) * WIDTH
    du = take(grad + same_place, step, start, tokens, QUERIES, WIDTH, CUT)
    delta, strength_grad, evenly = _row_facts(
        du, out + same_place, step, own_v, row, before, first_row, own_sums, tile, start, tokens,
        strength_of(strength, head, constant, LEARNT), sharper, share,
        CORRECTED, CONTRAST, MIXED, CAUSAL, LEARNT, WIDTH, CUT, QUERIES, PRECISION,
    )  # fmt: skip
    if LEARNT:
        tl.store(grad_strength + member * tiles + tile, strength_grad)
    q = take(own + head * WIDTH, row, start, tokens, QUERIES, WIDTH, CUT)
    # Rows that do not exist get no weight. They are stored too, so that the second pass needs no masks.
    log_sum = take_facts(log_sums + member.to(tl.int64) * tokens, start, tokens, float("inf"), QUERIES, CUT)
    padded = tiles * QUERIES
    own_facts = facts + member.to(tl.int64) * 2 * padded + start + tl.arange(0, QUERIES)
    tl.store(own_facts, log_sum)
    tl.store(own_facts + padded, delta)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    through = tl.zeros((QUERIES,), tl.float32)
    begin, end = keys_in_part(start, tokens, CAUSAL, QUERIES, KEYS)
    if CAUSAL or CUT:
        dq, through = _add_keys(
            q, du, log_sum, delta, dq, through, own_k, own_v, row, before, first_row, sharper, share, begin, end, start,
            tokens, scale, CONTRAST, MIXED, CAUSAL, True, CUT, WIDTH, QUERIES, KEYS, PRECISION,
        )  # fmt: skip
    dq, through = _add_keys(
        q, du, log_sum, delta, dq, through, own_k, own_v, row, before, first_row, sharper, share, 0, begin, start,
        tokens, scale, CONTRAST, MIXED, CAUSAL, False, False, WIDTH, QUERIES, KEYS, PRECISION,
    )  # fmt: skip
    if CONTRAST:
        tl.store(grad_contrast + member * tiles + tile, tl.sum(through) - evenly)
    wide = step + 2 * (heads // GROUP) * WIDTH
    put(grad_qkv + batch * tokens * wide + head * WIDTH, wide, start, tokens, dq * scale, QUERIES, WIDTH, CUT)


@triton.jit
def _add_queries(
    k, v, dk, dv, own_q, row, grads, step, facts, padded, contrasts, begin, steps, steps_before, last, start, tokens,
    scale,
    CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, PART: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add some tiles of queries of all heads of a group to dk and dw, as keys × queries, without the scale.

    These are `steps` tiles from `begin` on. In a PART, the tile after the first `steps_before` is the last one of all.
    Keys beyond the last token need no mask: their sums are not written.
    """
    for index in range(0, GROUP * steps):  # one loop, so that the next head's first tile is loaded in time
        head = index // steps if GROUP > 1 else 0
        query = begin + (index - head * steps) * QUERIES
        if PART:
            query = tl.where(index - head * steps < steps_before, query, last)
        q = take(own_q + head * WIDTH, row, query, tokens, QUERIES, WIDTH, CUT)
        own_facts = facts + head * 2 * padded + query + tl.arange(0, QUERIES)
        log_sum = tl.load(own_facts)
        products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        weights = tl.exp2(products * (scale * LOG2_E) - log_sum[None, :])
        if PART and CAUSAL:
            rows, keys = tl.arange(0, QUERIES) + query, tl.arange(0, KEYS) + start
            weights = hide(weights, rows[None, :], keys[:, None], 0.0, tokens, True)
        du = take(grads + head * WIDTH, step, query, tokens, QUERIES, WIDTH, CUT)
        delta = tl.load(own_facts + padded)
        dweights = tl.dot(v, tl.trans(du), input_precision=PRECISION)
        if CONTRAST:
            contrast = tl.load(contrasts + head).to(tl.float32)
            dv = tl.dot((contrast * weights).to(du.dtype), du, dv, input_precision=PRECISION)
            dweights = contrast * dweights
        else:
            dv = tl.dot(weights.to(du.dtype), du, dv, input_precision=PRECISION)
        dlogits = weights * (dweights - delta[None, :])
        dk = tl.dot(dlogits.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def _backward_keys(
    qkv, first, strength, contrast, residual, owed, facts, grad, later, grad_qkv, grad_first, grad_residual, tiles,
    together, at_a_time, tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row, padded,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the query heads that share them, and its part of the gradient of ρ.

    With LATER, dv includes the gradient from later layers, which use these values as their v⁰.
    """
    tile, place_of_group = place(tiles, together, at_a_time)
    start, kv_heads = tile * KEYS, heads // GROUP
    group, batch = place_of_group % kv_heads, (place_of_group // kv_heads).to(tl.int64)
    own, step = qkv + batch * qkv_batch, heads * WIDTH
    key_head, value_head = shared_heads(group, heads, GROUP)
    own_v, before = own + value_head * WIDTH, first + batch * first_batch + group * WIDTH
    share = strength_of(residual, group, 0.0, MIXED)
    k = take(own + key_head * WIDTH, row, start, tokens, KEYS, WIDTH, CUT)
    v = take_values(own_v, row, before, first_row, share, start, tokens, KEYS, WIDTH, CUT, MIXED)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    # Tiles of queries: `across` the diagonal, then `whole` ones, then one that is cut.
    begin, last = start + KEYS if CAUSAL else 0, tokens // QUERIES * QUERIES
    across = tl.cdiv(tl.minimum(KEYS, tokens - start), QUERIES) if CAUSAL else 0
    whole = tl.maximum(last - begin, 0) // QUERIES
    cut = tl.where((last < tokens) & (begin <= last), 1, 0)
    head = group * GROUP
    own_q, grads = own + head * WIDTH, grad + batch * tokens * step + head * WIDTH
    own_facts = facts + (batch * heads + head) * 2 * padded
    if CAUSAL or CUT:
        dk, dv = _add_queries(
            k, v, dk, dv, own_q, row, grads, step, own_facts, padded, contrast + head, start, across + cut, across,
            last, start, tokens, scale, CONTRAST, CAUSAL, True, CUT, WIDTH, GROUP, QUERIES, KEYS, PRECISION,
        )  # fmt: skip
    dk, dv = _add_queries(
        k, v, dk, dv, own_q, row, grads, step, own_facts, padded, contrast + head, begin, whole, 0, last, start,
        tokens, scale, CONTRAST, CAUSAL, False, False, WIDTH, GROUP, QUERIES, KEYS, PRECISION,
    )  # fmt: skip
    if CONTRAST:
        own_owed = owed + place_of_group.to(tl.int64) * (tiles if CAUSAL else 1) * WIDTH
        dv += tl.load(own_owed + (tile * WIDTH if CAUSAL else 0) + tl.arange(0, WIDTH))[None, :]
    if CORRECTED or (CONTRAST and CAUSAL):
        for member in range(0, GROUP):
            du = take(grads + member * WIDTH, step, start, tokens, KEYS, WIDTH, CUT)
            if CONTRAST and CAUSAL:
                sharper = tl.load(contrast + head + member).to(tl.float32)
                dv += (1.0 - sharper) * owed_within(du, start, PRECISION)
            if CORRECTED:
                dv -= strength_of(strength, head + member, constant, LEARNT) * du.to(tl.float32)
    values = kv_heads * WIDTH
    if MIXED:
        pull = take(before, first_row, start, tokens, KEYS, WIDTH, CUT).to(tl.float32)
        pull -= take(own_v, row, start, tokens, KEYS, WIDTH, CUT).to(tl.float32)
        tl.store(grad_residual + place_of_group * tiles + tile, tl.sum(dv * pull))
        into_first = grad_first + batch * tokens * values + group * WIDTH
        put(into_first, values, start, tokens, share * dv, KEYS, WIDTH, CUT)
        dv *= 1.0 - share
    if LATER:
        more = later + batch * tokens * values + group * WIDTH
        dv += take(more, values, start, tokens, KEYS, WIDTH, CUT).to(tl.float32)
    wide = step + 2 * values
    into = grad_qkv + batch * tokens * wide
    put(into + key_head * WIDTH, wide, start, tokens, dk * scale, KEYS, WIDTH, CUT)
    put(into + value_head * WIDTH, wide, start, tokens, dv, KEYS, WIDTH, CUT)


def backward(
    grad: Tensor,
    later: Tensor | None,
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    contrast: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    constant: float,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
    *,
    query_tile: Tile | None = None,
    key_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of qkv, of v⁰ through the mixed values, and of λ, c and ρ by batch and head.

    The arguments are those of `long_forward.forward`, what it returned, the gradient of u, and `later`, which is added
    to the gradient of v. Both gradients are contiguous. The caller sums the last three; those not wanted are empty.
    """
    batch, tokens, packed = qkv.shape
    width, plain = packed // (heads + 2 * kv_heads), contrast is None and residual is None
    query_tile = query_tile or chosen(QUERY_TILES, qkv, width, plain)
    key_tile = key_tile or chosen(KEY_TILES, qkv, width, plain)
    tiles, key_tiles = tiles_of(tokens, query_tile.queries), tiles_of(tokens, key_tile.keys)
    padded = tiles * query_tile.queries
    facts = torch.empty(batch, heads, 2, padded, dtype=torch.float32, device=qkv.device)  # log-sum and Σ du·(c·A w)
    grad_qkv = qkv.new_empty(qkv.shape)
    grad_first = qkv.new_empty((batch, tokens, kv_heads * width) if residual is not None else 0)
    of_strength, of_contrast, of_residual = (
        torch.empty((batch, *parts) if wanted is not None else (0, 1), dtype=torch.float32, device=qkv.device)
        for wanted, parts in (
            (strength, (heads, tiles)),
            (contrast, (heads, tiles)),
            (residual, (kv_heads, key_tiles)),
        )
    )
    sums = owed = facts
    if contrast is not None:
        sums = sums_seen(qkv, first, residual, kv_heads, width, query_tile.queries, causal)
        owed = sums_owed(grad, contrast, heads, kv_heads, key_tile.keys, causal)
    given = (qkv, *stand_ins(qkv, first, strength), *stand_ins(qkv, contrast, residual))
    sizes, steps = (tokens, heads, scale, constant), strides(qkv, first)
    shape = {**kind(qkv, first, strength, width, causal, constant), **features(contrast, residual, heads, kv_heads)}
    two_rows = 2 * tokens * width * qkv.element_size()
    _backward_queries[(tiles * batch * heads,)](
        *given, sums, out, log_sums, facts, grad, grad_qkv, of_strength, of_contrast,
        tiles, batch * heads, heads_at_a_time(batch * heads, two_rows * kv_heads // heads), *sizes, *steps,
        CUT=tokens % query_tile.queries != 0, **shape, **query_tile.options(),
    )  # fmt: skip
    _backward_keys[(key_tiles * batch * kv_heads,)](
        *given, owed, facts, grad, qkv if later is None else later, grad_qkv, grad_first, of_residual,
        key_tiles, batch * kv_heads, heads_at_a_time(batch * kv_heads, two_rows * heads // kv_heads), *sizes, *steps,
        padded, LATER=later is not None, CUT=tokens % key_tile.keys != 0, **shape, **key_tile.options(),
    )  # fmt: skip
    return grad_qkv, grad_first, over_tiles(of_strength), over_tiles(of_contrast), over_tiles(of_residual)
