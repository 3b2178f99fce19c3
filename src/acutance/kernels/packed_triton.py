"""Triton kernels of `packed`: attention over a few hundred tokens, the correction in the epilogue, final layouts.

Tokens are cut into blocks of 64 and a smaller last tile (65 = 64 + 16, not 128), because short sequences would waste
most of a large tile. The forward pass takes one program per tile of queries. The backward pass takes one program per
head up to one block and a tail; above, one per tile of queries for dq, then one per tile of keys for dk and dv.

Everything is computed in float32 from inputs of any precision. `FULL` counts whole blocks, `TAIL` is the size of the
last tile (0: none). Logarithms are to base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = tl.constexpr(64)
_BLOCK = 64
WIDEST_IN_ONE = 64  # of a head whose whole backward pass one program's registers hold


@triton.jit
def _load(base, stride, start, tokens, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """Rows of one head; beyond the last token, where only a CUT tile reaches, they are zero."""
    rows, columns = tl.arange(0, SIZE) + start, tl.arange(0, WIDTH)
    place = base + rows[:, None] * stride + columns[None, :]
    if CUT:
        return tl.load(place, mask=rows[:, None] < tokens, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _store(base, stride, start, tokens, tile, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    rows, columns = tl.arange(0, SIZE) + start, tl.arange(0, WIDTH)
    place = base + rows[:, None] * stride + columns[None, :]
    if CUT:
        tl.store(place, tile.to(base.dtype.element_ty), mask=rows[:, None] < tokens)
    else:
        tl.store(place, tile.to(base.dtype.element_ty))


@triton.jit
def _strength(strength, head, constant, LEARNT: tl.constexpr):
    if LEARNT:
        return tl.load(strength + head).to(tl.float32)
    else:
        return constant


@triton.jit
def _seen(tile, rows, keys, hidden, tokens, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """A tile of query–key pairs with what is not to be seen hidden: keys beyond the last token, and later ones."""
    if CAUSAL:
        tile = tl.where(keys <= rows, tile, hidden)
    if CUT:
        tile = tl.where(keys < tokens, tile, hidden)
    return tile


@triton.jit
def _attend(
    q, k, v, u, top, total, first_row, first_key, tokens, scale,
    CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax: u and total are in units of 2^top."""
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    rows, keys = tl.arange(0, q.shape[0]) + first_row, tl.arange(0, k.shape[0]) + first_key
    products = _seen(products, rows[:, None], keys[None, :], float("-inf"), tokens, CAUSAL, CUT)
    higher = tl.maximum(top, tl.max(products, 1) * (scale * LOG2_E))
    weights = tl.exp2(products * (scale * LOG2_E) - higher[:, None])  # one fused multiply and add
    shrink = tl.exp2(top - higher)
    u = tl.dot(weights.to(v.dtype), v, u * shrink[:, None], input_precision=PRECISION)
    return u, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def _visible(start, CAUSAL: tl.constexpr, FULL: tl.constexpr):
    """Where the whole blocks of keys end that a tile of queries from `start` on may see."""
    if CAUSAL:
        return tl.minimum(start + BLOCK, FULL * BLOCK)
    else:
        return FULL * BLOCK


@triton.jit
def _rows_forward(
    start,
    own,
    before,
    into,
    log_sums,
    step,
    row,
    first_row,
    tokens,
    scale,
    strength,
    CORRECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIZE: tl.constexpr,
    CUT: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """u of one tile of queries, and the logarithm of each row's sum."""
    q = _load(own, row, start, tokens, SIZE, WIDTH, CUT)
    if CORRECTED:  # asked for now, so that it arrives while the products are made
        first = _load(before, first_row, start, tokens, SIZE, WIDTH, CUT)
    u = tl.zeros((SIZE, WIDTH), tl.float32)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for key in range(0, _visible(start, CAUSAL, FULL), BLOCK):
        k = _load(own + step, row, key, tokens, BLOCK, WIDTH, False)
        v = _load(own + 2 * step, row, key, tokens, BLOCK, WIDTH, False)
        u, top, total = _attend(q, k, v, u, top, total, start, key, tokens, scale, CAUSAL, False, PRECISION)
    if TAIL > 0 and (CUT or not CAUSAL):
        last_k = _load(own + step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_v = _load(own + 2 * step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        u, top, total = _attend(
            q, last_k, last_v, u, top, total, start, FULL * BLOCK, tokens, scale, CAUSAL, True, PRECISION
        )
    u = u / total[:, None]
    if CORRECTED:
        own_v = _load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT)
        u += strength * (first.to(tl.float32) - own_v.to(tl.float32))
    _store(into, step, start, tokens, u, SIZE, WIDTH, CUT)
    rows = tl.arange(0, SIZE) + start
    tl.store(log_sums + rows, top + tl.log2(total), rows < tokens)


@triton.jit
def _forward(
    qkv,
    first,
    strength,
    out,
    log_sums,
    tokens,
    heads,
    scale,
    constant,
    qkv_batch,
    row,
    first_batch,
    first_row,
    CORRECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    into = out + batch * tokens * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = _strength(strength, head, constant, LEARNT)
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


@triton.jit
def _row_facts(
    start,
    own,
    row,
    before,
    first_row,
    made,
    grads,
    step,
    log_sums,
    tokens,
    strength,
    CORRECTED: tl.constexpr,
    LEARNT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CUT: tl.constexpr,
):
    """q, du, log-sum and Σ du·(A v) of a tile of queries, and what it adds to the gradient of the strength."""
    q = _load(own, row, start, tokens, SIZE, WIDTH, CUT)
    du = _load(grads, step, start, tokens, SIZE, WIDTH, CUT)
    average = _load(made, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    strength_grad = 0.0
    if CORRECTED:
        first = _load(before, first_row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
        pull = first - _load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
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
    weights = _seen(weights, rows[None, :], keys[:, None], 0.0, tokens, CAUSAL, CUT)
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
    weights = _seen(weights, rows[:, None], keys[None, :], 0.0, tokens, CAUSAL, CUT)
    dweights = tl.dot(du, tl.trans(v), input_precision=PRECISION)
    return tl.dot((weights * (dweights - delta[:, None])).to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _put_keys(
    into,
    grads,
    step,
    strength,
    scale,
    start,
    tokens,
    dk,
    dv,
    CORRECTED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CUT: tl.constexpr,
):
    if CORRECTED:
        dv -= strength * _load(grads, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    _store(into + step, 3 * step, start, tokens, dk * scale, SIZE, WIDTH, CUT)
    _store(into + 2 * step, 3 * step, start, tokens, dv, SIZE, WIDTH, CUT)


@triton.jit
def _head_keys(
    start, own, row, grads, step, into, tokens, scale, strength, q0, g0, s0, e0, dq0, q1, g1, s1, e1, dq1,
    CORRECTED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr,
    CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys against the head's block of queries (0) and its tail (1)."""
    k = _load(own + step, row, start, tokens, SIZE, WIDTH, CUT)
    v = _load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT)
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
    qkv,
    first,
    strength,
    out,
    log_sums,
    grad,
    grad_qkv,
    grad_strength,
    tokens,
    heads,
    scale,
    constant,
    qkv_batch,
    row,
    first_batch,
    first_row,
    CORRECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,  # of the block of queries
    CUT: tl.constexpr,  # whether it reaches beyond the last token
    TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All gradients of one head of at most a block and a tail."""
    place = tl.program_id(0)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    made = out + batch * tokens * step + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    sums = log_sums + place.to(tl.int64) * tokens
    lam = _strength(strength, head, constant, LEARNT)
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
        _store(into, 3 * step, SIZE, tokens, dq1 * scale, TAIL, WIDTH, True)
    _store(into, 3 * step, 0, tokens, dq0 * scale, SIZE, WIDTH, CUT)
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
    for key in range(0, _visible(start, CAUSAL, FULL), BLOCK):
        k = _load(own + step, row, key, tokens, BLOCK, WIDTH, False)
        v = _load(own + 2 * step, row, key, tokens, BLOCK, WIDTH, False)
        dq = _by_rows(q, du, log_sum, delta, k, v, dq, start, key, tokens, scale, CAUSAL, False, PRECISION)
    if TAIL > 0 and (CUT or not CAUSAL):
        last_k = _load(own + step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_v = _load(own + 2 * step, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        dq = _by_rows(
            q, du, log_sum, delta, last_k, last_v, dq, start, FULL * BLOCK, tokens, scale, CAUSAL, True, PRECISION
        )
    _store(into, 3 * step, start, tokens, dq * scale, SIZE, WIDTH, CUT)
    return strength_grad


@triton.jit
def _backward_rows(
    qkv,
    first,
    strength,
    out,
    log_sums,
    deltas,
    grad,
    grad_qkv,
    grad_strength,
    tokens,
    heads,
    scale,
    constant,
    qkv_batch,
    row,
    first_batch,
    first_row,
    CORRECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    before = first + batch * first_batch + head * WIDTH
    made = out + batch * tokens * step + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    sums, sums_of_grads = log_sums + place.to(tl.int64) * tokens, deltas + place.to(tl.int64) * tokens
    lam = _strength(strength, head, constant, LEARNT)
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
    k = _load(own + step, row, start, tokens, SIZE, WIDTH, CUT)
    v = _load(own + 2 * step, row, start, tokens, SIZE, WIDTH, CUT)
    dk = tl.zeros((SIZE, WIDTH), tl.float32)
    dv = tl.zeros((SIZE, WIDTH), tl.float32)
    for query in range(start if CAUSAL else 0, FULL * BLOCK, BLOCK):  # earlier queries do not see these keys
        q = _load(own, row, query, tokens, BLOCK, WIDTH, False)
        du = _load(grads, step, query, tokens, BLOCK, WIDTH, False)
        log_sum = tl.load(log_sums + query + tl.arange(0, BLOCK))
        delta = tl.load(deltas + query + tl.arange(0, BLOCK))
        dk, dv, _ = _by_keys(q, du, log_sum, delta, k, v, dk, dv, query, start, tokens, scale, CAUSAL, CUT, PRECISION)
    if TAIL > 0:
        last_q = _load(own, row, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        last_du = _load(grads, step, FULL * BLOCK, tokens, TAIL, WIDTH, True)
        rows = tl.arange(0, TAIL) + FULL * BLOCK
        last_sum = tl.load(log_sums + rows, mask=rows < tokens, other=float("inf"))
        last_delta = tl.load(deltas + rows, mask=rows < tokens, other=0.0)
        dk, dv, _ = _by_keys(
            last_q,
            last_du,
            last_sum,
            last_delta,
            k,
            v,
            dk,
            dv,
            FULL * BLOCK,
            start,
            tokens,
            scale,
            CAUSAL,
            CUT,
            PRECISION,
        )
    _put_keys(into, grads, step, strength, scale, start, tokens, dk, dv, CORRECTED, SIZE, WIDTH, CUT)


@triton.jit
def _backward_keys(
    qkv,
    strength,
    log_sums,
    deltas,
    grad,
    grad_qkv,
    tokens,
    heads,
    scale,
    constant,
    qkv_batch,
    row,
    CORRECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEARNT: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, place = tl.program_id(0), tl.program_id(1)
    head, batch = place % heads, (place // heads).to(tl.int64)
    step = heads * WIDTH
    own = qkv + batch * qkv_batch + head * WIDTH
    grads = grad + batch * tokens * step + head * WIDTH
    into = grad_qkv + batch * tokens * 3 * step + head * WIDTH
    sums, sums_of_grads = log_sums + place.to(tl.int64) * tokens, deltas + place.to(tl.int64) * tokens
    lam = _strength(strength, head, constant, LEARNT)
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
        qkv if first is None else first,
        qkv if strength is None else strength,
        out,
        log_sums,
        tokens,
        heads,
        scale,
        constant,
        *_strides(qkv, first),
        FULL=full,
        TAIL=tail,
        **_kind(qkv, first, strength, width, causal),
        num_warps=4,
        num_stages=2,
        maxnreg=96 if qkv.element_size() == 2 and width <= 64 else None,  # more programs at once hide the memory better
    )
    return out, log_sums


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
    kind = _kind(qkv, first, strength, width, causal)
    before, lam = qkv if first is None else first, qkv if strength is None else strength
    sizes, strides = (tokens, heads, scale, constant), _strides(qkv, first)
    if in_one:
        size, rest = (_BLOCK, tail) if full else (tail, 0)
        _backward_head[(batch * heads,)](
            qkv, before, lam, out, log_sums, grad, grad_qkv, grad_strength, *sizes, *strides,
            SIZE=size, CUT=not full, TAIL=rest, **kind, num_warps=4 if size > 32 else 2, num_stages=1,
        )  # fmt: skip
        return grad_qkv, grad_strength[..., 0]
    deltas = torch.empty_like(log_sums)
    _backward_rows[(tiles, batch * heads)](
        qkv, before, lam, out, log_sums, deltas, grad, grad_qkv, grad_strength, *sizes, *strides,
        FULL=full, TAIL=tail, **kind, num_warps=4, num_stages=2, maxnreg=128,
    )  # fmt: skip
    _backward_keys[(tiles, batch * heads)](
        qkv, lam, log_sums, deltas, grad, grad_qkv, *sizes, *strides[:2],
        FULL=full, TAIL=tail, **kind, num_warps=4, num_stages=1,
    )  # fmt: skip
    return grad_qkv, grad_strength.sum(-1) if strength is not None else grad_strength[..., 0]


def cut(tokens: int) -> tuple[int, int]:
    """Whole blocks, and the smallest tile that takes the rest and that the tensor cores take."""
    full, rest = divmod(tokens, _BLOCK)
    return full, max(16, 1 << (rest - 1).bit_length()) if rest else 0


def _strides(qkv: Tensor, first: Tensor | None) -> tuple[int, int, int, int]:
    first = qkv if first is None else first
    return qkv.stride(0), qkv.stride(1), first.stride(0), first.stride(1)


def _kind(qkv: Tensor, first: Tensor | None, strength: Tensor | None, width: int, causal: bool) -> dict[str, object]:
    return {
        "CORRECTED": first is not None,
        "CAUSAL": causal,
        "LEARNT": strength is not None,
        "WIDTH": width,
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }
