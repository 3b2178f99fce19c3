"""Attention with its correction in one kernel: one program per tile of queries, over all tiles of keys.

Everything is computed in float32 from inputs of any precision. Logarithms are to base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.packed_tiles import (
    BLOCK,
    LOG2_E,
    cut,
    features,
    keys_of,
    kind,
    load,
    load_values,
    seen,
    stand_ins,
    store,
    strength_of,
    strides,
    visible,
    visible_mean,
)


@triton.jit
def _attend(
    q, k, v, u, top, total, first_row, first_key, tokens, scale,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax: u and total are in units of 2^top."""
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
    start, own, keys, values, before, into, log_sums, step, row, first_row, tokens, scale, strength, contrast, residual,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr,
    CUT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u of one tile of queries, and the logarithm of each row's sum."""
    q = load(own, row, start, tokens, SIZE, WIDTH, CUT)
    if CORRECTED:  # loaded now, so that it arrives while the products are made
        first = load(before, first_row, start, tokens, SIZE, WIDTH, CUT)
    u = tl.zeros((SIZE, WIDTH), tl.float32)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for key in range(0, visible(start, CAUSAL, FULL), BLOCK):
        k = load(keys, row, key, tokens, BLOCK, WIDTH, False)
        v = load_values(values, row, before, first_row, residual, key, tokens, BLOCK, WIDTH, False, MIXED)
        u, top, total = _attend(q, k, v, u, top, total, start, key, tokens, scale, CAUSAL, False, PRECISION)
    if TAIL > 0 and (CUT or not CAUSAL):
        last_k = load(keys, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_v = load_values(values, row, before, first_row, residual, FULL * BLOCK, tokens, TAIL, WIDTH, True, MIXED)
        u, top, total = _attend(
            q, last_k, last_v, u, top, total, start, FULL * BLOCK, tokens, scale, CAUSAL, True, PRECISION
        )
    u = u / total[:, None]
    if CONTRAST:
        mean = visible_mean(
            values, row, before, first_row, residual, start, tokens, CAUSAL, SIZE, CUT, WIDTH, FULL, TAIL, MIXED,
            PRECISION,
        )  # fmt: skip
        u = contrast * u + (1.0 - contrast) * mean
    if CORRECTED:
        own_v = load_values(values, row, before, first_row, residual, start, tokens, SIZE, WIDTH, CUT, MIXED)
        u += strength * (first.to(tl.float32) - own_v.to(tl.float32))
    store(into, step, start, tokens, u, SIZE, WIDTH, CUT)
    rows = tl.arange(0, SIZE) + start
    tl.store(log_sums + rows, top + tl.log2(total), rows < tokens)


@triton.jit
def _forward(
    qkv, first, strength, contrast, residual, out, log_sums, tokens, heads, scale, constant, qkv_batch, row,
    first_batch, first_row,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    keys = keys_of(own, head, step, WIDTH, GROUP)
    values = keys + step // GROUP
    before = first + batch * first_batch + head // GROUP * WIDTH
    into = out + batch * tokens * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = strength_of(strength, head, constant, LEARNT)
    sharper, share = strength_of(contrast, head, 1.0, CONTRAST), strength_of(residual, head // GROUP, 0.0, MIXED)
    if block < FULL:
        _rows_forward(
            block * BLOCK, own, keys, values, before, into, sums, step, row, first_row, tokens, scale, lam, sharper,
            share, CORRECTED, CONTRAST, MIXED, CAUSAL, BLOCK, False, WIDTH, FULL, TAIL, PRECISION,
        )  # fmt: skip
    else:
        if TAIL > 0:
            _rows_forward(
                FULL * BLOCK, own, keys, values, before, into, sums, step, row, first_row, tokens, scale, lam, sharper,
                share, CORRECTED, CONTRAST, MIXED, CAUSAL, TAIL, True, WIDTH, FULL, TAIL, PRECISION,
            )  # fmt: skip


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
) -> tuple[Tensor, Tensor]:
    """u (batch, tokens, heads · width) from q, k and v side by side, and the rows' log-sums for the backward pass."""
    batch, tokens, packed = qkv.shape
    width = packed // (heads + 2 * kv_heads)
    out = qkv.new_empty(batch, tokens, heads * width)
    log_sums = torch.empty(batch, heads, tokens, dtype=torch.float32, device=qkv.device)
    full, tail = cut(tokens)
    # Fewer registers let more programs run at once, which hides memory latency better, until they spill.
    registers = 96 if contrast is None and residual is None else 128
    _forward[(full + (tail > 0), batch * heads)](
        qkv,
        *stand_ins(qkv, first, strength),
        *stand_ins(qkv, contrast, residual),
        out,
        log_sums,
        *(tokens, heads, scale, constant),
        *strides(qkv, first),
        FULL=full,
        TAIL=tail,
        **kind(qkv, first, strength, width, causal, constant),
        **features(contrast, residual, heads, kv_heads),
        num_warps=4,
        num_stages=2,
        maxnreg=registers if qkv.element_size() == 2 and width <= 64 else None,
    )
    return out, log_sums
