"""What the backward kernels of `packed` share: the gradients of one tile of queries and one of keys.

With c the contrast, du is the gradient of u = c·A w + (1 − c)·U w + λ (v⁰ − w), w = v + ρ (v⁰ − v). Rows of queries
that do not exist have du = 0 and a log-sum of ∞, so that they add nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from acutance.attention.kernels.packed_tiles import (
    LOG2_E,
    even_weights,
    load,
    load_values,
    seen,
    store,
    visible_mean,
)


@triton.jit
def row_facts(
    start, own, values, row, before, first_row, made, grads, step, log_sums, tokens, strength, contrast, residual,
    CORRECTED: tl.constexpr, CONTRAST: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr, LEARNT: tl.constexpr,
    SIZE: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q, du, log-sum and Σ du·(c·A w) of a tile of queries, and its part of the strength's gradient."""
    q = load(own, row, start, tokens, SIZE, WIDTH, CUT)
    du = load(grads, step, start, tokens, SIZE, WIDTH, CUT)
    average = load(made, step, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    strength_grad = 0.0
    if CORRECTED:
        first = load(before, first_row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
        own_v = load_values(values, row, before, first_row, residual, start, tokens, SIZE, WIDTH, CUT, MIXED)
        pull = first - own_v.to(tl.float32)
        average -= strength * pull
        if LEARNT:
            strength_grad = tl.sum(du.to(tl.float32) * pull)
    if CONTRAST:
        average -= (1.0 - contrast) * visible_mean(
            values, row, before, first_row, residual, start, tokens, CAUSAL, SIZE, CUT, WIDTH, FULL, TAIL, MIXED,
            PRECISION,
        )  # fmt: skip
    rows = tl.arange(0, SIZE) + start
    log_sum = tl.load(log_sums + rows, mask=rows < tokens, other=float("inf"))
    return q, du, log_sum, tl.sum(du.to(tl.float32) * average, 1), strength_grad


@triton.jit
def weights_to(
    k, q, log_sum, rows, keys, tokens, scale, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr
):
    """A of one tile, keys × queries; `rows` and `keys` are their places, in that shape."""
    weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2_E) - log_sum[None, :])
    return seen(weights, rows, keys, 0.0, tokens, CAUSAL, CUT)


@triton.jit
def contrasted(weights, rows, keys, tokens, contrast, CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """c·A + (1 − c)·U, the weights of the values."""
    if CONTRAST:
        return contrast * weights + (1.0 - contrast) * even_weights(weights, rows, keys, tokens, CAUSAL, CUT)
    else:
        return weights


@triton.jit
def of_contrast(
    weights, dweights, rows, keys, tokens, contrast, CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr
):
    """The gradients of A and of c from that of `contrasted`."""
    if CONTRAST:
        even = even_weights(weights, rows, keys, tokens, CAUSAL, CUT)
        return contrast * dweights, tl.sum((weights - even) * dweights)
    else:
        return dweights, 0.0


@triton.jit
def by_keys(
    q, du, log_sum, delta, k, v, dk, dv, first_row, first_key, tokens, scale, contrast,
    CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of one tile of queries in dk, without the scale, and in dw of one tile of keys."""
    rows = (tl.arange(0, q.shape[0]) + first_row)[None, :]
    keys = (tl.arange(0, k.shape[0]) + first_key)[:, None]
    weights = weights_to(k, q, log_sum, rows, keys, tokens, scale, CAUSAL, CUT, PRECISION)
    averaging = contrasted(weights, rows, keys, tokens, contrast, CONTRAST, CAUSAL, CUT)
    dv = tl.dot(averaging.to(du.dtype), du, dv, input_precision=PRECISION)
    dweights = tl.dot(v, tl.trans(du), input_precision=PRECISION)
    dweights, _ = of_contrast(weights, dweights, rows, keys, tokens, contrast, CONTRAST, CAUSAL, CUT)
    dlogits = (weights * (dweights - delta[None, :])).to(q.dtype)
    return tl.dot(dlogits, q, dk, input_precision=PRECISION), dv


@triton.jit
def by_rows(
    q, du, log_sum, delta, k, v, dq, first_row, first_key, tokens, scale, contrast,
    CONTRAST: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of one tile of keys in dq of one tile of queries, without the scale, and in the contrast's gradient."""
    rows = (tl.arange(0, q.shape[0]) + first_row)[:, None]
    keys = (tl.arange(0, k.shape[0]) + first_key)[None, :]
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E) - log_sum[:, None])
    weights = seen(weights, rows, keys, 0.0, tokens, CAUSAL, CUT)
    dweights = tl.dot(du, tl.trans(v), input_precision=PRECISION)
    dweights, contrast_grad = of_contrast(weights, dweights, rows, keys, tokens, contrast, CONTRAST, CAUSAL, CUT)
    dlogits = (weights * (dweights - delta[:, None])).to(k.dtype)
    return tl.dot(dlogits, k, dq, input_precision=PRECISION), contrast_grad


@triton.jit
def put_keys(
    into_keys, into_values, into_row, into_first, later, width_of_all, values, row, before, first_row, residual, scale,
    start, tokens, dk, dv,
    MIXED: tl.constexpr, LATER: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Write dk and dv and, if MIXED, v⁰'s part of dw. Returns the tile's part of the gradient of ρ.

    With LATER, dv includes the gradient from later layers, which use these values as their v⁰.
    """
    residual_grad = 0.0
    if MIXED:
        first = load(before, first_row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
        residual_grad = tl.sum(dv * (first - load(values, row, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)))
        store(into_first, width_of_all, start, tokens, residual * dv, SIZE, WIDTH, CUT)
        dv *= 1.0 - residual
    if LATER:
        dv += load(later, width_of_all, start, tokens, SIZE, WIDTH, CUT).to(tl.float32)
    store(into_keys, into_row, start, tokens, dk * scale, SIZE, WIDTH, CUT)
    store(into_values, into_row, start, tokens, dv, SIZE, WIDTH, CUT)
    return residual_grad
