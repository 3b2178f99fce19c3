"""All gradients of a head of at most a block and a tail, in whose one program's registers everything fits."""

from __future__ import annotations

import triton
import triton.language as tl

from acutance.kernels.packed_gradients import by_keys, put_keys, row_facts
from acutance.kernels.packed_tiles import BLOCK, load, load_values, store, strength_of

WIDEST_IN_ONE = 64  # of a head whose whole backward pass one program's registers hold


@triton.jit
def _head_keys(
    start, own, row, before, first_row, grads, step, into, into_first, later, tokens, scale, strength, contrast,
    residual, q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys against the head's block of queries (0) and its tail (1)."""
    k = load(own + step, row, start, tokens, SIZE, WIDTH, CUT)
    v = load_values(own + 2 * step, row, before, first_row, residual, start, tokens, SIZE, WIDTH, CUT, MIXED)
    dk = tl.zeros((SIZE, WIDTH), tl.float32)
    dv = tl.zeros((SIZE, WIDTH), tl.float32)
    dk, dv, dlogits, contrast_grad = by_keys(
        q0, g0, s0, e0, k, v, dk, dv, 0, start, tokens, scale, contrast, CONTRAST, CAUSAL, CUT, PRECISION
    )
    dq0 = tl.dot(tl.trans(dlogits), k, dq0, input_precision=PRECISION)
    if TAIL > 0:
        dk, dv, last_dlogits, more = by_keys(
            q1, g1, s1, e1, k, v, dk, dv, BLOCK, start, tokens, scale, contrast, CONTRAST, CAUSAL, CUT, PRECISION
        )
        contrast_grad += more
        dq1 = tl.dot(tl.trans(last_dlogits), k, dq1, input_precision=PRECISION)
    if CORRECTED:
        dv -= strength * load(grads, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    residual_grad = put_keys(
        into + step, into + 2 * step, 3 * step, into_first, later, step, own + 2 * step, row, before, first_row,
        residual, scale, start, tokens, dk, dv, MIXED, LATER, SIZE, WIDTH, CUT,
    )  # fmt: skip
    return dq0, dq1, contrast_grad, residual_grad


@triton.jit
def backward_head(
    qkv, first, strength, contrast, residual, out, log_sums, grad, later, grad_qkv, grad_first, grad_strength,
    grad_contrast, grad_residual, tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per head; its block of queries may be CUT."""
    place = tl.program_id(0)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    made = out + batch * tokens * step + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    into_first = grad_first + batch * tokens * step + head * WIDTH
    owed = later + batch * tokens * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    sharper, share = strength_of(contrast, head, 1.0, CONTRAST), strength_of(residual, head, 0.0, MIXED)
    # The means are cut as elsewhere: into whole blocks and a last tile.
    WHOLE: tl.constexpr = 0 if CUT else 1
    LAST: tl.constexpr = SIZE if CUT else TAIL
    q0, g0, s0, e0, strength_grad = row_facts(
        0, own, own + 2 * step, row, before, first_row, made, grads, step, sums, tokens, lam, sharper, share,
        CORRECTED, CONTRAST, MIXED, CAUSAL, LEARNT, SIZE, CUT, WIDTH, WHOLE, LAST, PRECISION,
    )  # fmt: skip
    q1, g1, s1, e1 = q0, g0, s0, e0
    if TAIL > 0:
        q1, g1, s1, e1, more = row_facts(
            SIZE, own, own + 2 * step, row, before, first_row, made, grads, step, sums, tokens, lam, sharper, share,
            CORRECTED, CONTRAST, MIXED, CAUSAL, LEARNT, TAIL, True, WIDTH, WHOLE, LAST, PRECISION,
        )  # fmt: skip
        strength_grad += more
    dq0 = tl.zeros(q0.shape, tl.float32)
    dq1 = tl.zeros(q1.shape, tl.float32)
    dq0, dq1, contrast_grad, residual_grad = _head_keys(
        0, own, row, before, first_row, grads, step, into, into_first, owed, tokens, scale, lam, sharper, share,
        q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
        CORRECTED, CONTRAST, MIXED, LATER, CAUSAL, SIZE, WIDTH, TAIL, CUT, PRECISION,
    )  # fmt: skip
    if TAIL > 0:
        dq0, dq1, more_contrast, more_residual = _head_keys(
            SIZE, own, row, before, first_row, grads, step, into, into_first, owed, tokens, scale, lam, sharper, share,
            q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
            CORRECTED, CONTRAST, MIXED, LATER, CAUSAL, TAIL, WIDTH, TAIL, True, PRECISION,
        )  # fmt: skip
        contrast_grad += more_contrast
        residual_grad += more_residual
        store(into, 3 * step, SIZE, tokens, dq1 * scale, TAIL, WIDTH, True)
    store(into, 3 * step, 0, tokens, dq0 * scale, SIZE, WIDTH, CUT)
    if LEARNT:
        tl.store(grad_strength + place, strength_grad)
    if CONTRAST:
        tl.store(grad_contrast + place, contrast_grad)
    if MIXED:
        tl.store(grad_residual + place, residual_grad)
