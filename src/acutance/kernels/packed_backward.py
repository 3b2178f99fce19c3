"""The gradients of `packed_forward`.

A head of at most a block and a tail takes one program, in whose registers everything fits. A longer one takes one
program per tile of queries for dq, then one per tile of keys for dk and dv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.packed_tiles import (
    BLOCK,
    BLOCK_TOKENS,
    LOG2_E,
    cut,
    kind,
    load,
    seen,
    stand_ins,
    store,
    strength_of,
    strides,
    visible,
)

WIDEST_IN_ONE = 64  # of a head whose whole backward pass one program's registers hold


@triton.jit
def _row_facts(
    start, own, row, before, first_row, made, grads, step, log_sums, tokens, strength,
    CORRECTED: tl.constexpr, LEARNT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """q, du, log-sum and Σ du·(A v) of a tile of queries, and what it adds to the gradient of the strength."""
    q = load(own, row, start, tokens, SIZE, WIDTH, CUT)
    du = load(grads, step, start, tokens, SIZE, WIDTH, CUT)
    average = load(made, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    strength_grad = 0.0
    if CORRECTED:
        first = load(before, first_row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
        pull = first - load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
        average -= strength * pull
        if LEARNT:
            strength_grad = tl.sum(du.to(tl.float32) * pull)
    rows = tl.arange(0, SIZE) + start
    log_sum = tl.load(log_sums + rows, mask=rows < tokens, other=float("inf"))  # no weight for rows that do not exist
    return q, du, log_sum, tl.sum(du.to(tl.float32) * average, 1), strength_grad


@triton.jit
def _by_keys(
    q, du, log_sum, delta, k, v, dk, dv, first_row, first_key, tokens, scale,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to dk and dv of one tile of keys, and dlogits, keys × queries; scale left out."""
    weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2_E) - log_sum[None, :])
    rows, keys = tl.arange(0, q.shape[0]) + first_row, tl.arange(0, k.shape[0]) + first_key
    weights = seen(weights, rows[None, :], keys[:, None], 0.0, tokens, CAUSAL, CUT)
    dv = tl.dot(weights.to(du.dtype), du, dv, input_precision=PRECISION)
    dweights = tl.dot(v, tl.trans(du), input_precision=PRECISION)
    dlogits = (weights * (dweights - delta[None, :])).to(q.dtype)
    return tl.dot(dlogits, q, dk, input_precision=PRECISION), dv, dlogits


@triton.jit
def _by_rows(
    q, du, log_sum, delta, k, v, dq, first_row, first_key, tokens, scale,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dq of one tile of queries; scale left out."""
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E) - log_sum[:, None])
    rows, keys = tl.arange(0, q.shape[0]) + first_row, tl.arange(0, k.shape[0]) + first_key
    weights = seen(weights, rows[:, None], keys[None, :], 0.0, tokens, CAUSAL, CUT)
    dweights = tl.dot(du, tl.trans(v), input_precision=PRECISION)
    return tl.dot((weights * (dweights - delta[:, None])).to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _put_keys(
    into, grads, step, strength, scale, start, tokens, dk, dv,
    CORRECTED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    if CORRECTED:
        dv -= strength * load(grads, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    store(into + step, 3 * step, start, tokens, dk * scale, SIZE, WIDTH, CUT)
    store(into + 2 * step, 3 * step, start, tokens, dv, SIZE, WIDTH, CUT)


@triton.jit
def _head_keys(
    start, own, row, grads, step, into, tokens, scale, strength, q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr,
    CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys against the head's block of queries (0) and its tail (1)."""
    k = load(own + step, row, start, tokens, SIZE, WIDTH, CUT)
    v = load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT)
    dk = tl.zeros((SIZE, WIDTH), tl.float32)
    dv = tl.zeros((SIZE, WIDTH), tl.float32)
    dk, dv, dlogits = _by_keys(q0, g0, s0, e0, k, v, dk, dv, 0, start, tokens, scale, CAUSAL, CUT, PRECISION)
    dq0 = tl.dot(tl.trans(dlogits), k, dq0, input_precision=PRECISION)
    if TAIL > 0:
        dk, dv, last_dlogits = _by_keys(
            q1, g1, s1, e1, k, v, dk, dv, BLOCK, start, tokens, scale, CAUSAL, CUT, PRECISION
        )
        dq1 = tl.dot(tl.trans(last_dlogits), k, dq1, input_precision=PRECISION)
    _put_keys(into, grads, step, strength, scale, start, tokens, dk, dv, CORRECTED, SIZE, WIDTH, CUT)
    return dq0, dq1


@triton.jit
def _backward_head(
    qkv, first, strength, out, log_sums, grad, grad_qkv, grad_strength, tokens, heads, scale, constant, qkv_batch,
    row, first_batch, first_row,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    CUT: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one head of at most a block of queries, which may be CUT, and a tail."""
    place = tl.program_id(0)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    made = out + batch * tokens * step + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    q0, g0, s0, e0, strength_grad = _row_facts(
        0, own, row, before, first_row, made, grads, step, sums, tokens, lam, CORRECTED, LEARNT, SIZE, WIDTH, CUT
    )
    q1, g1, s1, e1 = q0, g0, s0, e0
    if TAIL > 0:
        q1, g1, s1, e1, more = _row_facts(
            SIZE, own, row, before, first_row, made, grads, step, sums, tokens, lam, CORRECTED, LEARNT, TAIL, WIDTH,
            True,
        )  # fmt: skip
        strength_grad += more
    dq0 = tl.zeros(q0.shape, tl.float32)
    dq1 = tl.zeros(q1.shape, tl.float32)
    dq0, dq1 = _head_keys(
        0, own, row, grads, step, into, tokens, scale, lam, q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
        CORRECTED, CAUSAL, SIZE, WIDTH, TAIL, CUT, PRECISION,
    )  # fmt: skip
    if TAIL > 0:
        dq0, dq1 = _head_keys(
            SIZE, own, row, grads, step, into, tokens, scale, lam, q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
            CORRECTED, CAUSAL, TAIL, WIDTH, TAIL, True, PRECISION,
        )  # fmt: skip
        store(into, 3 * step, SIZE, tokens, dq1 * scale, TAIL, WIDTH, True)
    store(into, 3 * step, 0, tokens, dq0 * scale, SIZE, WIDTH, CUT)
    if LEARNT:
        tl.store(grad_strength + place, strength_grad)


@triton.jit
def _rows_backward(
    start, own, row, before, first_row, made, grads, step, log_sums, deltas, into, tokens, scale, strength,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries; leaves its Σ du·(A v) for the pass over keys."""
    q, du, log_sum, delta, strength_grad = _row_facts(
        start, own, row, before, first_row, made, grads, step, log_sums, tokens, strength, CORRECTED, LEARNT, SIZE,
        WIDTH, CUT,
    )  # fmt: skip
    rows = tl.arange(0, SIZE) + start
    tl.store(deltas + rows, delta, rows < tokens)
    dq = tl.zeros((SIZE, WIDTH), tl.float32)
    for key in range(0, visible(start, CAUSAL, FULL), BLOCK):
        k = load(own + step, row, key, tokens, BLOCK, WIDTH, False)
        v = load(own + 2 * step, row, key, tokens, BLOCK, WIDTH, False)
        dq = _by_rows(q, du, log_sum, delta, k, v, dq, start, key, tokens, scale, CAUSAL, False, PRECISION)
    if TAIL > 0 and (CUT or not CAUSAL):
        last_k = load(own + step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_v = load(own + 2 * step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        dq = _by_rows(
            q, du, log_sum, delta, last_k, last_v, dq, start, FULL * BLOCK, tokens, scale, CAUSAL, True, PRECISION
        )
    store(into, 3 * step, start, tokens, dq * scale, SIZE, WIDTH, CUT)
    return strength_grad


@triton.jit
def _backward_rows(
    qkv, first, strength, out, log_sums, deltas, grad, grad_qkv, grad_strength, tokens, heads, scale, constant,
    qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    made = out + batch * tokens * step + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    sums, sums_of_grads = log_sums + place.to(tl.int64) * tokens, deltas + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    strength_grad = 0.0
    if block < FULL:
        strength_grad = _rows_backward(
            block * BLOCK, own, row, before, first_row, made, grads, step, sums, sums_of_grads, into, tokens, scale,
            lam, CORRECTED, CAUSAL, LEARNT, BLOCK, False, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    else:
        if TAIL > 0:
            strength_grad = _rows_backward(
                FULL * BLOCK, own, row, before, first_row, made, grads, step, sums, sums_of_grads, into, tokens, scale,
                lam, CORRECTED, CAUSAL, LEARNT, TAIL, True, WIDTH, FULL, TAIL, PRECISION,
            )  # fmt: skip
    if LEARNT:
        tl.store(grad_strength + place * tl.num_programs(0) + block, strength_grad)


@triton.jit
def _keys_backward(
    start, own, row, grads, step, log_sums, deltas, into, tokens, scale, strength,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys."""
    k = load(own + step, row, start, tokens, SIZE, WIDTH, CUT)
    v = load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT)
    dk = tl.zeros((SIZE, WIDTH), tl.float32)
    dv = tl.zeros((SIZE, WIDTH), tl.float32)
    for query in range(start if CAUSAL else 0, FULL * BLOCK, BLOCK):  # earlier queries do not see these keys
        q = load(own, row, query, tokens, BLOCK, WIDTH, False)
        du = load(grads, step, query, tokens, BLOCK, WIDTH, False)
        log_sum = tl.load(log_sums + query + tl.arange(0, BLOCK))
        delta = tl.load(deltas + query + tl.arange(0, BLOCK))
        dk, dv, _ = _by_keys(q, du, log_sum, delta, k, v, dk, dv, query, start, tokens, scale, CAUSAL, CUT, PRECISION)
    if TAIL > 0:
        last_q = load(own, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_du = load(grads, step, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        rows = tl.arange(0, TAIL) + FULL * BLOCK
        last_sum = tl.load(log_sums + rows, mask=rows < tokens, other=float("inf"))
        last_delta = tl.load(deltas + rows, mask=rows < tokens, other=0.0)
        dk, dv, _ = _by_keys(
            last_q, last_du, last_sum, last_delta, k, v, dk, dv, FULL * BLOCK, start, tokens, scale, CAUSAL, CUT,
            PRECISION,
        )  # fmt: skip
    _put_keys(into, grads, step, strength, scale, start, tokens, dk, dv, CORRECTED, SIZE, WIDTH, CUT)


@triton.jit
def _backward_keys(
    qkv, strength, log_sums, deltas, grad, grad_qkv, tokens, heads, scale, constant, qkv_batch, row,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    sums, sums_of_grads = log_sums + place.to(tl.int64) * tokens, deltas + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    if block < FULL:
        _keys_backward(
            block * BLOCK, own, row, grads, step, sums, sums_of_grads, into, tokens, scale, lam,
            CORRECTED, CAUSAL, BLOCK, False, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    else:
        if TAIL > 0:
            _keys_backward(
                FULL * BLOCK, own, row, grads, step, sums, sums_of_grads, into, tokens, scale, lam,
                CORRECTED, CAUSAL, TAIL, True, WIDTH, FULL, TAIL, PRECISION,
            )  # fmt: skip


def backward(
    grad: Tensor,
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    constant: float,
    heads: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of q, k and v side by side, and of the strength by batch and head, to be summed up."""
    batch, tokens, packed = qkv.shape
    full, tail = cut(tokens)
    tiles, width = full + (tail > 0), packed // (3 * heads)
    in_one = full <= 1 and width <= WIDEST_IN_ONE
    grad_qkv = qkv.new_empty(qkv.shape)
    grad_strength = torch.empty(batch, heads, 1 if in_one else tiles, dtype=torch.float32, device=qkv.device)
    before, lam = stand_ins(qkv, first, strength)
    chosen, sizes, steps = (
        kind(qkv, first, strength, width, causal),
        (tokens, heads, scale, constant),
        strides(qkv, first),
    )
    if in_one:
        size, rest = (BLOCK_TOKENS, tail) if full else (tail, 0)
        _backward_head[(batch * heads,)](
            qkv, before, lam, out, log_sums, grad, grad_qkv, grad_strength, *sizes, *steps,
            SIZE=size, CUT=not full, TAIL=rest, **chosen, num_warps=4 if size > 32 else 2, num_stages=1,
        )  # fmt: skip
        return grad_qkv, grad_strength[..., 0]
    deltas = torch.empty_like(log_sums)
    _backward_rows[(tiles, batch * heads)](
        qkv, before, lam, out, log_sums, deltas, grad, grad_qkv, grad_strength, *sizes, *steps,
        FULL=full, TAIL=tail, **chosen, num_warps=4, num_stages=2, maxnreg=128,
    )  # fmt: skip
    _backward_keys[(tiles, batch * heads)](
        qkv, lam, log_sums, deltas, grad, grad_qkv, *sizes, *steps[:2],
        FULL=full, TAIL=tail, **chosen, num_warps=4, num_stages=1,
    )  # fmt: skip
    return grad_qkv, grad_strength.sum(-1) if strength is not None else grad_strength[..., 0]
