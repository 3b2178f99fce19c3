"""All gradients of a head of at most a block and a tail, in one program whose registers hold everything.

It holds all weights of a row and sums Σ du·(c·A w) from them, so it does not read u, nor v⁰ if λ is a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from acutance.attention.kernels.packed_gradients import contrasted, of_contrast, put_keys, weights_to
from acutance.attention.kernels.packed_tiles import load, load_values, store, strength_of

WIDEST_IN_ONE = 64  # of a head whose whole backward pass fits into one program's registers


@triton.jit
def _load_queries(
    start, own, row, grads, step, log_sums, tokens, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr
):
    """q, du and log-sum of a tile."""
    rows = tl.arange(0, SIZE) + start
    log_sum = tl.load(log_sums + rows, mask=rows < tokens, other=float("inf"))
    return load(own, row, start, tokens, SIZE, WIDTH, CUT), load(grads, step, start, tokens, SIZE, WIDTH, CUT), log_sum


@triton.jit
def _load_keys(
    start, own, row, step, before, first_row, residual, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """k and w of a tile."""
    v = load_values(own + 2 * step, row, before, first_row, residual, start, tokens, SIZE, WIDTH, CUT, MIXED)
    return load(own + step, row, start, tokens, SIZE, WIDTH, CUT), v


@triton.jit
def _pair(
    q, du, log_sum, k, v, first_row, first_key, tokens, scale, contrast,
    CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For a tile of queries and one of keys: the weights of the values, A, its gradient and the contrast's."""
    rows = (tl.arange(0, q.shape[0]) + first_row)[None, :]
    keys = (tl.arange(0, k.shape[0]) + first_key)[:, None]
    weights = weights_to(k, q, log_sum, rows, keys, tokens, scale, CAUSAL, CUT, PRECISION)
    dweights = tl.dot(v, tl.trans(du), input_precision=PRECISION)
    averaging = contrasted(weights, rows, keys, tokens, contrast, CONTRAST, CAUSAL, CUT).to(du.dtype)
    dweights, contrast_grad = of_contrast(weights, dweights, rows, keys, tokens, contrast, CONTRAST, CAUSAL, CUT)
    return averaging, weights, dweights, contrast_grad


@triton.jit
def _from_rows(
    averaging, dlogits, last_averaging, last_dlogits, du, last_du, q, last_q, own_du, strength,
    CORRECTED: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, without the scale, and dw of a tile of keys from the block of queries and its tail."""
    dk = tl.dot(dlogits, q, input_precision=PRECISION)
    dv = tl.dot(averaging, du, input_precision=PRECISION)
    if TAIL > 0:
        dk = tl.dot(last_dlogits, last_q, dk, input_precision=PRECISION)
        dv = tl.dot(last_averaging, last_du, dv, input_precision=PRECISION)
    if CORRECTED:
        dv -= strength * own_du.to(tl.float32)
    return dk, dv


@triton.jit
def _of_strength(start, du, v, before, first_row, tokens, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """A tile's part of the gradient of λ."""
    first = load(before, first_row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    return tl.sum(du.to(tl.float32) * (first - v.to(tl.float32)))


@triton.jit
def backward_head(
    qkv, first, strength, contrast, residual, log_sums, grad, later, grad_qkv, grad_first, grad_strength,
    grad_contrast, grad_residual, tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per head; its block of queries and keys (0), which may be CUT, and its tail (1).

    Names with two digits belong to a tile of keys and one of queries: `w01` is the block's keys and the tail's queries.
    """
    place = tl.program_id(0)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    into_first = grad_first + batch * tokens * step + head * WIDTH
    owed = later + batch * tokens * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    sharper, share = strength_of(contrast, head, 1.0, CONTRAST), strength_of(residual, head, 0.0, MIXED)
    q0, g0, s0 = _load_queries(0, own, row, grads, step, sums, tokens, SIZE, WIDTH, CUT)
    k0, v0 = _load_keys(0, own, row, step, before, first_row, share, tokens, SIZE, WIDTH, CUT, MIXED)
    m00, w00, d00, contrast_grad = _pair(
        q0, g0, s0, k0, v0, 0, 0, tokens, scale, sharper, CONTRAST, CAUSAL, CUT, PRECISION
    )
    e0 = tl.sum(w00 * d00, 0)
    q1, g1, m01, l01 = q0, g0, m00, m00  # not read where there is no tail
    if TAIL > 0:
        q1, g1, s1 = _load_queries(SIZE, own, row, grads, step, sums, tokens, TAIL, WIDTH, True)
        k1, v1 = _load_keys(SIZE, own, row, step, before, first_row, share, tokens, TAIL, WIDTH, True, MIXED)
        m10, w10, d10, more10 = _pair(
            q0, g0, s0, k1, v1, 0, SIZE, tokens, scale, sharper, CONTRAST, CAUSAL, True, PRECISION
        )
        m01, w01, d01, more01 = _pair(
            q1, g1, s1, k0, v0, SIZE, 0, tokens, scale, sharper, CONTRAST, CAUSAL, CUT, PRECISION
        )
        m11, w11, d11, more11 = _pair(
            q1, g1, s1, k1, v1, SIZE, SIZE, tokens, scale, sharper, CONTRAST, CAUSAL, True, PRECISION
        )
        contrast_grad += more10 + more01 + more11
        e0 += tl.sum(w10 * d10, 0)
        e1 = tl.sum(w01 * d01, 0) + tl.sum(w11 * d11, 0)
        l10 = (w10 * (d10 - e0[None, :])).to(q0.dtype)
        l01 = (w01 * (d01 - e1[None, :])).to(q0.dtype)
        l11 = (w11 * (d11 - e1[None, :])).to(q0.dtype)
    l00 = (w00 * (d00 - e0[None, :])).to(q0.dtype)
    strength_grad = 0.0
    if LEARNT:
        strength_grad += _of_strength(0, g0, v0, before, first_row, tokens, SIZE, WIDTH, CUT)
    dk, dv = _from_rows(m00, l00, m01, l01, g0, g1, q0, q1, g0, lam, CORRECTED, TAIL, PRECISION)
    residual_grad = put_keys(
        into + step, into + 2 * step, 3 * step, into_first, owed, step, own + 2 * step, row, before, first_row, share,
        scale, 0, tokens, dk, dv, MIXED, LATER, SIZE, WIDTH, CUT,
    )  # fmt: skip
    dq = tl.dot(tl.trans(l00), k0, input_precision=PRECISION)
    if TAIL > 0:
        if LEARNT:
            strength_grad += _of_strength(SIZE, g1, v1, before, first_row, tokens, TAIL, WIDTH, True)
        dq = tl.dot(tl.trans(l10), k1, dq, input_precision=PRECISION)
        last_dk, last_dv = _from_rows(m10, l10, m11, l11, g0, g1, q0, q1, g1, lam, CORRECTED, TAIL, PRECISION)
        residual_grad += put_keys(
            into + step, into + 2 * step, 3 * step, into_first, owed, step, own + 2 * step, row, before, first_row,
            share, scale, SIZE, tokens, last_dk, last_dv, MIXED, LATER, TAIL, WIDTH, True,
        )  # fmt: skip
        last_dq = tl.dot(tl.trans(l01), k0, input_precision=PRECISION)
        last_dq = tl.dot(tl.trans(l11), k1, last_dq, input_precision=PRECISION)
        store(into, 3 * step, SIZE, tokens, last_dq * scale, TAIL, WIDTH, True)
    store(into, 3 * step, 0, tokens, dq * scale, SIZE, WIDTH, CUT)
    if LEARNT:
        tl.store(grad_strength + place, strength_grad)
    if CONTRAST:
        tl.store(grad_contrast + place, contrast_grad)
    if MIXED:
        tl.store(grad_residual + place, residual_grad)
