"""The gradients of `packed_forward`.

A head of at most a block and a tail that shares its keys with no other takes one program (`packed_head`). Otherwise one
program per tile of queries makes dq, then one per tile of keys makes dk and dv. The latter goes through all query heads
that share the keys: their sum stays in registers, so it is the same in every run and takes no memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.packed_gradients import by_keys, by_rows, put_keys, row_facts
from acutance.attention.kernels.packed_head import WIDEST_IN_ONE, backward_head
from acutance.attention.kernels.packed_one_more import backward_one_more
from acutance.attention.kernels.packed_tiles import (
    BLOCK,
    BLOCK_TOKENS,
    cut,
    features,
    keys_of,
    kind,
    load,
    load_values,
    over_tiles,
    stand_ins,
    store,
    strength_of,
    strides,
    visible,
)


@triton.jit
def _rows_backward(
    start, own, keys, values, row, before, first_row, made, grads, step, log_sums, deltas, into, into_row, tokens,
    scale, strength, contrast, residual,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    SIZE: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, and its part of the gradients of λ and c. Writes Σ du·(c·A w) for the next pass."""
    q, du, log_sum, delta, strength_grad = row_facts(
        start, own, values, row, before, first_row, made, grads, step, log_sums, tokens, strength, contrast, residual,
        CORRECTED, CONTRAST, MIXED, CAUSAL, LEARNT, SIZE, CUT, WIDTH, FULL, TAIL, PRECISION,
    )  # fmt: skip
    rows = tl.arange(0, SIZE) + start
    tl.store(deltas + rows, delta, rows < tokens)
    dq = tl.zeros((SIZE, WIDTH), tl.float32)
    contrast_grad = 0.0
    for key in range(0, visible(start, CAUSAL, FULL), BLOCK):
        k = load(keys, row, key, tokens, BLOCK, WIDTH, False)
        v = load_values(values, row, before, first_row, residual, key, tokens, BLOCK, WIDTH, False, MIXED)
        dq, more = by_rows(
            q, du, log_sum, delta, k, v, dq, start, key, tokens, scale, contrast, CONTRAST, CAUSAL, False, PRECISION
        )
        if CONTRAST:
            contrast_grad += more
    if TAIL > 0 and (CUT or not CAUSAL):
        last_k = load(keys, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_v = load_values(values, row, before, first_row, residual, FULL * BLOCK, tokens, TAIL, WIDTH, True, MIXED)
        dq, more = by_rows(
            q, du, log_sum, delta, last_k, last_v, dq, start, FULL * BLOCK, tokens, scale, contrast,
            CONTRAST, CAUSAL, True, PRECISION,
        )  # fmt: skip
        contrast_grad += more
    store(into, into_row, start, tokens, dq * scale, SIZE, WIDTH, CUT)
    return strength_grad, contrast_grad


@triton.jit
def _backward_rows(
    qkv, first, strength, contrast, residual, out, log_sums, deltas, grad, grad_qkv, grad_strength, grad_contrast,
    tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    into_row = step + 2 * (step // GROUP)
    own = qkv + batch * qkv_batch + head * WIDTH
    keys = keys_of(own, head, step, WIDTH, GROUP)
    values = keys + step // GROUP
    before = first + batch * first_batch + head // GROUP * WIDTH
    made = out + batch * tokens * step + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * into_row + head * WIDTH
    sums, sums_of_grads = log_sums + place.to(tl.int64) * tokens, deltas + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    sharper, share = strength_of(contrast, head, 1.0, CONTRAST), strength_of(residual, head // GROUP, 0.0, MIXED)
    strength_grad = 0.0
    contrast_grad = 0.0
    if block < FULL:
        strength_grad, contrast_grad = _rows_backward(
            block * BLOCK, own, keys, values, row, before, first_row, made, grads, step, sums, sums_of_grads, into,
            into_row, tokens, scale, lam, sharper, share,
            CORRECTED, CONTRAST, MIXED, CAUSAL, LEARNT, BLOCK, False, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    else:
        if TAIL > 0:
            strength_grad, contrast_grad = _rows_backward(
                FULL * BLOCK, own, keys, values, row, before, first_row, made, grads, step, sums, sums_of_grads, into,
                into_row, tokens, scale, lam, sharper, share,
                CORRECTED, CONTRAST, MIXED, CAUSAL, LEARNT, TAIL, True, WIDTH, FULL, TAIL, PRECISION,
            )  # fmt: skip
    if LEARNT:
        tl.store(grad_strength + place * tl.num_programs(0) + block, strength_grad)
    if CONTRAST:
        tl.store(grad_contrast + place * tl.num_programs(0) + block, contrast_grad)


@triton.jit
def _from_queries(
    k, v, dk, dv, start, own, row, grads, step, log_sums, deltas, tokens, scale, strength, contrast,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of all queries of one head in dk and dw of one tile of keys."""
    for query in range(start if CAUSAL else 0, FULL * BLOCK, BLOCK):  # earlier queries do not see these keys
        q = load(own, row, query, tokens, BLOCK, WIDTH, False)
        du = load(grads, step, query, tokens, BLOCK, WIDTH, False)
        log_sum = tl.load(log_sums + query + tl.arange(0, BLOCK))
        delta = tl.load(deltas + query + tl.arange(0, BLOCK))
        dk, dv = by_keys(
            q, du, log_sum, delta, k, v, dk, dv, query, start, tokens, scale, contrast, CONTRAST, CAUSAL, CUT, PRECISION
        )
    if TAIL > 0:
        last_q = load(own, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_du = load(grads, step, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        rows = tl.arange(0, TAIL) + FULL * BLOCK
        last_sum = tl.load(log_sums + rows, mask=rows < tokens, other=float("inf"))
        last_delta = tl.load(deltas + rows, mask=rows < tokens, other=0.0)
        dk, dv = by_keys(
            last_q, last_du, last_sum, last_delta, k, v, dk, dv, FULL * BLOCK, start, tokens, scale, contrast,
            CONTRAST, CAUSAL, CUT, PRECISION,
        )  # fmt: skip
    if CORRECTED:
        dv -= strength * load(grads, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    return dk, dv


@triton.jit
def _keys_backward(
    start, own, keys, values, row, before, first_row, grads, step, log_sums, deltas, into_keys, into_row, into_first,
    later, head, tokens, scale, strength, contrast, residual, constant,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, from all heads of the GROUP; its part of the gradient of ρ."""
    k = load(keys, row, start, tokens, SIZE, WIDTH, CUT)
    v = load_values(values, row, before, first_row, residual, start, tokens, SIZE, WIDTH, CUT, MIXED)
    dk = tl.zeros((SIZE, WIDTH), tl.float32)
    dv = tl.zeros((SIZE, WIDTH), tl.float32)
    for member in range(GROUP):
        lam = strength_of(strength, head + member, constant, LEARNT)
        sharper = strength_of(contrast, head + member, 1.0, CONTRAST)
        dk, dv = _from_queries(
            k, v, dk, dv, start, own + member * WIDTH, row, grads + member * WIDTH, step, log_sums + member * tokens,
            deltas + member * tokens, tokens, scale, lam, sharper,
            CORRECTED, CONTRAST, CAUSAL, SIZE, CUT, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    return put_keys(
        into_keys, into_keys + step // GROUP, into_row, into_first, later, step // GROUP, values, row, before,
        first_row, residual, scale, start, tokens, dk, dv, MIXED, LATER, SIZE, WIDTH, CUT,
    )  # fmt: skip


@triton.jit
def _backward_keys(
    qkv, first, strength, contrast, residual, log_sums, deltas, grad, later, grad_qkv, grad_first, grad_residual,
    tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, LATER: tl.constexpr, CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1)
    kv_heads = heads // GROUP
    kv_head, batch = place % kv_heads, (place // kv_heads).to(tl.int64)
    head = kv_head * GROUP  # the first that shares these keys
    step = heads * WIDTH
    into_row = step + 2 * (step // GROUP)
    own = qkv + batch * qkv_batch + head * WIDTH
    keys = keys_of(own, head, step, WIDTH, GROUP)
    values = keys + step // GROUP
    before = first + batch * first_batch + kv_head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into_keys = grad_qkv + batch * tokens * into_row + step + kv_head * WIDTH
    into_first = grad_first + batch * tokens * (step // GROUP) + kv_head * WIDTH
    owed = later + batch * tokens * (step // GROUP) + kv_head * WIDTH
    rows = (place * GROUP).to(tl.int64) * tokens
    share = strength_of(residual, kv_head, 0.0, MIXED)
    residual_grad = 0.0
    if block < FULL:
        residual_grad = _keys_backward(
            block * BLOCK, own, keys, values, row, before, first_row, grads, step, log_sums + rows, deltas + rows,
            into_keys, into_row, into_first, owed, head, tokens, scale, strength, contrast, share, constant,
            CORRECTED, CONTRAST, MIXED, LATER, CAUSAL, LEARNT, GROUP, BLOCK, False, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    else:
        if TAIL > 0:
            residual_grad = _keys_backward(
                FULL * BLOCK, own, keys, values, row, before, first_row, grads, step, log_sums + rows, deltas + rows,
                into_keys, into_row, into_first, owed, head, tokens, scale, strength, contrast, share, constant,
                CORRECTED, CONTRAST, MIXED, LATER, CAUSAL, LEARNT, GROUP, TAIL, True, WIDTH, FULL, TAIL, PRECISION,
            )  # fmt: skip
    if MIXED:
        tl.store(grad_residual + place * tl.num_programs(0) + block, residual_grad)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of qkv, of v⁰ through the mixed values, and of λ, c and ρ by batch and head.

    The caller sums the last three; those not wanted are empty. `later`, contiguous (batch, tokens, kv_heads · width),
    is added to the gradient of v.
    """
    batch, tokens, packed = qkv.shape
    full, tail = cut(tokens)
    tiles, width = full + (tail > 0), packed // (heads + 2 * kv_heads)
    in_one = full <= 1 and width <= WIDEST_IN_ONE and kv_heads == heads
    parts = 1 if in_one else tiles
    grad_qkv = qkv.new_empty(qkv.shape)
    grad_first = qkv.new_empty((batch, tokens, kv_heads * width) if residual is not None else 0)
    of_strength, of_contrast, of_residual = (
        torch.empty((batch, count, parts) if wanted is not None else (0, 1), dtype=torch.float32, device=qkv.device)
        for wanted, count in ((strength, heads), (contrast, heads), (residual, kv_heads))
    )
    given = (qkv, *stand_ins(qkv, first, strength), *stand_ins(qkv, contrast, residual))
    chosen, sizes = kind(qkv, first, strength, width, causal, constant), (tokens, heads, scale, constant)
    extra, steps = features(contrast, residual, heads, kv_heads), strides(qkv, first)
    owed, adds = qkv if later is None else later, {"LATER": later is not None}
    if in_one and tokens == BLOCK_TOKENS + 1 and contrast is None and residual is None:
        backward_one_more[(batch * heads,)](
            qkv, *stand_ins(qkv, first, strength), log_sums, grad, owed, grad_qkv, of_strength, *sizes[1:], *steps,
            **chosen, **adds, num_warps=4, num_stages=1,
        )  # fmt: skip
    elif in_one:
        size, rest = (BLOCK_TOKENS, tail) if full else (tail, 0)
        del extra["GROUP"]
        backward_head[(batch * heads,)](
            *given, log_sums, grad, owed, grad_qkv, grad_first, of_strength, of_contrast, of_residual, *sizes, *steps,
            SIZE=size, CUT=not full, TAIL=rest, **chosen, **extra, **adds,
            num_warps=4 if size > 32 else 2, num_stages=1,
        )  # fmt: skip
    else:
        deltas = torch.empty_like(log_sums)
        _backward_rows[(tiles, batch * heads)](
            *given, out, log_sums, deltas, grad, grad_qkv, of_strength, of_contrast, *sizes, *steps,
            FULL=full, TAIL=tail, **chosen, **extra, num_warps=4, num_stages=2,
            maxnreg=128 if residual is None else None,  # mixing would spill
        )  # fmt: skip
        _backward_keys[(tiles, batch * kv_heads)](
            *given, log_sums, deltas, grad, owed, grad_qkv, grad_first, of_residual, *sizes, *steps,
            FULL=full, TAIL=tail, **chosen, **extra, **adds, num_warps=4, num_stages=1,
        )  # fmt: skip
    return grad_qkv, grad_first, over_tiles(of_strength), over_tiles(of_contrast), over_tiles(of_residual)
