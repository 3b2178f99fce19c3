"""All gradients of a head of a block of tokens and one more, such as 64 patches and a class token, in one program.

Three tensor-core tiles for the last token would each be empty but for one row. Here the last token is a vector: its
logits are sums of products, and its parts of the block's gradients are outer products. As in `packed_head`, Σ du·(A v)
of a row is summed from its weights, so u is not read, nor v⁰ if λ is a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from acutance.attention.kernels.packed_tiles import BLOCK, LOG2_E, load, seen, store, strength_of


@triton.jit
def _row(base, WIDTH: tl.constexpr):
    """One token's part of a tensor, in float32."""
    return tl.load(base + tl.arange(0, WIDTH)).to(tl.float32)


@triton.jit
def _put_row(base, row, WIDTH: tl.constexpr):
    tl.store(base + tl.arange(0, WIDTH), row.to(base.dtype.element_ty))


@triton.jit
def _onto(tile, vector):
    """The product of each of the tile's rows with a vector."""
    return tl.sum(tile.to(tl.float32) * vector[None, :], 1)


@triton.jit
def _mixed(weights, tile):
    """The sum of the tile's rows, each times its weight."""
    return tl.sum(tile.to(tl.float32) * weights[:, None], 0)


@triton.jit
def backward_one_more(
    qkv, first, strength, log_sums, grad, later, grad_qkv, grad_strength, heads, scale, constant, qkv_batch, row,
    first_batch, first_row,
    CORRECTED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per head. A 1 in a name stands for the last token: `w01` is its weights of the block's keys."""
    place = tl.program_id(0)
    head, batch = place % heads, (place // heads).to(tl.int64)
    tokens: tl.constexpr = BLOCK + 1
    step, factor = heads * WIDTH, scale * LOG2_E
    own = qkv + batch * qkv_batch + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    owed = later + batch * tokens * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    places = tl.arange(0, BLOCK)
    q0, k0 = load(own, row, 0, tokens, BLOCK, WIDTH, False), load(own + step, row, 0, tokens, BLOCK, WIDTH, False)
    v0, g0 = (
        load(own + 2 * step, row, 0, tokens, BLOCK, WIDTH, False),
        load(grads, step, 0, tokens, BLOCK, WIDTH, False),
    )
    last = own + BLOCK * row
    q1, k1, v1 = _row(last, WIDTH), _row(last + step, WIDTH), _row(last + 2 * step, WIDTH)
    g1, s0, s1 = _row(grads + BLOCK * step, WIDTH), tl.load(sums + places), tl.load(sums + BLOCK)
    # First the block's parts in the last token's gradients, while its tiles are in registers.
    w01, d01 = tl.exp2(_onto(k0, q1) * factor - s1), _onto(v0, g1)
    w11, d11 = tl.exp2(tl.sum(q1 * k1) * factor - s1), tl.sum(v1 * g1)
    e1 = tl.sum(w01 * d01) + w11 * d11
    l01, l11 = w01 * (d01 - e1), w11 * (d11 - e1)
    dq1, dk1, dv1 = _mixed(l01, k0) + l11 * k1, l11 * q1, w11 * g1
    if not CAUSAL:  # with causality no other token sees the last one
        w10, d10 = tl.exp2(_onto(q0, k1) * factor - s0), _onto(g0, v1)
        dv1 += _mixed(w10, g0)
    # Keys × queries.
    w00 = tl.exp2(tl.dot(k0, tl.trans(q0), input_precision=PRECISION) * factor - s0[None, :])
    w00 = seen(w00, places[None, :], places[:, None], 0.0, tokens, CAUSAL, False)
    d00 = tl.dot(v0, tl.trans(g0), input_precision=PRECISION)
    e0 = tl.sum(w00 * d00, 0)
    if not CAUSAL:
        e0 += w10 * d10
        l10 = w10 * (d10 - e0)
    l00 = (w00 * (d00 - e0[None, :])).to(q0.dtype)
    dv0 = tl.dot(w00.to(g0.dtype), g0, input_precision=PRECISION) + w01[:, None] * g1[None, :]
    if CORRECTED:
        dv0 -= lam * g0.to(tl.float32)
        dv1 -= lam * g1
    if LATER:
        dv0 += load(owed, step, 0, tokens, BLOCK, WIDTH, False).to(tl.float32)
        dv1 += _row(owed + BLOCK * step, WIDTH)
    store(into + 2 * step, 3 * step, 0, tokens, dv0, BLOCK, WIDTH, False)
    dk0 = tl.dot(l00, q0, input_precision=PRECISION) + l01[:, None] * q1[None, :]
    store(into + step, 3 * step, 0, tokens, dk0 * scale, BLOCK, WIDTH, False)
    dq0 = tl.dot(tl.trans(l00), k0, input_precision=PRECISION)
    if not CAUSAL:
        dq0 += l10[:, None] * k1[None, :]
        # Read again: holding it in registers all the time would cost the room of a third program.
        dk1 += _mixed(l10, load(own, row, 0, tokens, BLOCK, WIDTH, False))
    store(into, 3 * step, 0, tokens, dq0 * scale, BLOCK, WIDTH, False)
    into_last = into + BLOCK * 3 * step
    _put_row(into_last, dq1 * scale, WIDTH)
    _put_row(into_last + step, dk1 * scale, WIDTH)
    _put_row(into_last + 2 * step, dv1, WIDTH)
    if LEARNT:
        pull = load(before, first_row, 0, tokens, BLOCK, WIDTH, False).to(tl.float32) - v0.to(tl.float32)
        pull1 = _row(before + BLOCK * first_row, WIDTH) - v1
        tl.store(grad_strength + place, tl.sum(g0.to(tl.float32) * pull) + tl.sum(g1 * pull1))
