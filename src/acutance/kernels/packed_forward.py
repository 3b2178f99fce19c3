"""Attention with its correction in one kernel: one program per tile of queries, over all tiles of keys.

Everything is computed in float32 from inputs of any precision. Logarithms are to base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.packed_tiles import (
    BLOCK,
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


@triton.jit
def _attend(
    q, k, v, u, top, total, first_row, first_key, tokens, scale,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax: u and total are in units of 2^top."""
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    rows, keys = tl.arange(0, q.shape[0]) + first_row, tl.arange(0, k.shape[0]) + first_key
    products = seen(products, rows[:, None], keys[None, :], float("-inf"), tokens, CAUSAL, CUT)
    higher = tl.maximum(top, tl.max(products, 1) * (scale * LOG2_E))
    weights = tl.exp2(products * (scale * LOG2_E) - higher[:, None])  # one fused multiply and add
    shrink = tl.exp2(top - higher)
    u = tl.dot(weights.to(v.dtype), v, u * shrink[:, None], input_precision=PRECISION)
    return u, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def _rows_forward(
    start, own, before, into, log_sums, step, row, first_row, tokens, scale, strength,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u of one tile of queries, and the logarithm of each row's sum."""
    q = load(own, row, start, tokens, SIZE, WIDTH, CUT)
    if CORRECTED:  # asked for now, so that it arrives while the products are made
        first = load(before, first_row, start, tokens, SIZE, WIDTH, CUT)
    u = tl.zeros((SIZE, WIDTH), tl.float32)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for key in range(0, visible(start, CAUSAL, FULL), BLOCK):
        k = load(own + step, row, key, tokens, BLOCK, WIDTH, False)
        v = load(own + 2 * step, row, key, tokens, BLOCK, WIDTH, False)
        u, top, total = _attend(q, k, v, u, top, total, start, key, tokens, scale, CAUSAL, False, PRECISION)
    if TAIL > 0 and (CUT or not CAUSAL):
        last_k = load(own + step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_v = load(own + 2 * step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        u, top, total = _attend(
            q, last_k, last_v, u, top, total, start, FULL * BLOCK, tokens, scale, CAUSAL, True, PRECISION
        )
    u = u / total[:, None]
    if CORRECTED:
        own_v = load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT)
        u += strength * (first.to(tl.float32) - own_v.to(tl.float32))
    store(into, step, start, tokens, u, SIZE, WIDTH, CUT)
    rows = tl.arange(0, SIZE) + start
    tl.store(log_sums + rows, top + tl.log2(total), rows < tokens)


@triton.jit
def _forward(
    qkv, first, strength, out, log_sums, tokens, heads, scale, constant, qkv_batch, row, first_batch, first_row,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    into = out + batch * tokens * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    if block < FULL:
        _rows_forward(
            block * BLOCK, own, before, into, sums, step, row, first_row, tokens, scale, lam,
            CORRECTED, CAUSAL, BLOCK, False, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    else:
        if TAIL > 0:
            _rows_forward(
                FULL * BLOCK, own, before, into, sums, step, row, first_row, tokens, scale, lam,
                CORRECTED, CAUSAL, TAIL, True, WIDTH, FULL, TAIL, PRECISION,
            )  # fmt: skip


def forward(
    qkv: Tensor, first: Tensor | None, strength: Tensor | None, constant: float, heads: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """u (batch, tokens, heads · width) from q, k and v side by side, and the rows' log-sums for the backward pass."""
    batch, tokens, packed = qkv.shape
    width = packed // (3 * heads)
    out = qkv.new_empty(batch, tokens, heads * width)
    log_sums = torch.empty(batch, heads, tokens, dtype=torch.float32, device=qkv.device)
    full, tail = cut(tokens)
    _forward[(full + (tail > 0), batch * heads)](
        qkv,
        *stand_ins(qkv, first, strength),
        out,
        log_sums,
        *(tokens, heads, scale, constant),
        *strides(qkv, first),
        FULL=full,
        TAIL=tail,
        **kind(qkv, first, strength, width, causal),
        num_warps=4,
        num_stages=2,
        maxnreg=96 if qkv.element_size() == 2 and width <= 64 else None,  # more programs at once hide the memory better
    )
    return out, log_sums
