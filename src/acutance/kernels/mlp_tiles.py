"""The kernels of `mlp`. A program reads the weights of its hidden channels once and goes through tiles of tokens.

All channels of a token are multiplied in one go, in chunks, so that nothing is summed up across programs. Products are
summed in float32, and what follows them is computed from that: the GELU is that of h before it is rounded, its slope
that of h as it was kept. Multiplying and adding at once is asked for by name: newer compilers do not join the two by
themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.mlp import CHUNK, COEFFICIENTS, FARTHEST, Tile
from acutance.kernels.sizes import tiles_of

POWERS = tl.constexpr(COEFFICIENTS)
DEGREE = tl.constexpr(len(COEFFICIENTS) - 1)
FAR = tl.constexpr(FARTHEST)
HALF_LOG2_E = tl.constexpr(0.7213475204444817)  # log₂ √e
LOG2_ROOT_TAU = tl.constexpr(1.3257480647361593)  # log₂ √(2π)


@triton.jit
def _beyond(a):
    """Φ(−a) for 0 ≤ a ≤ FAR."""
    exponent = tl.full(a.shape, POWERS[DEGREE], tl.float32)
    for k in tl.static_range(1, DEGREE + 1):
        exponent = tl.fma(exponent, a, POWERS[DEGREE - k])
    return tl.exp2(exponent)


@triton.jit
def _distance(x):
    """|x| up to FAR; not a number stays so, and with it all that is made of it."""
    return tl.minimum(tl.abs(x), FAR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(x):
    """By the polynomial."""
    a = _distance(x)
    return tl.maximum(x, 0.0) - a * _beyond(a)


@triton.jit
def _slope(x):
    """GELU'(x) = Φ(x) + x φ(x), which at −x is 1 less what it is at x."""
    a = _distance(x)
    density = tl.exp2(tl.fma(a * a, -HALF_LOG2_E, -LOG2_ROOT_TAU))
    left = _beyond(a) - a * density  # at −a
    return tl.where(x > 0, 1.0 - left, left)


@triton.jit
def _weights(
    weight, column, INSIDE: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """For the hidden channels from `column` on, (CHUNK, COLUMNS) each; TURNED if they lie as (HIDDEN, INSIDE)."""
    chunks = ()
    columns, inner = column + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    for k in tl.static_range(INSIDE // CHUNK):
        if TURNED:
            chunk = tl.load(weight + columns[:, None] * INSIDE + (k * CHUNK + inner)[None, :]).T
        else:
            chunk = tl.load(weight + (k * CHUNK + inner)[:, None] * HIDDEN + columns[None, :])
        chunks += (chunk,)  # type: ignore[assignment]
    return chunks


@triton.jit
def _product(
    tokens, start, there, weights, INSIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr
):
    """Tokens from `start` on times the weights, in float32."""
    places = tl.arange(0, ROWS)[:, None] * INSIDE + tl.arange(0, CHUNK)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(INSIDE // CHUNK):
        at = tokens + tl.cast(start, tl.int64) * INSIDE + k * CHUNK + places
        chunk = tl.load(at, mask=there, other=None if there is None else 0.0)
        total = tl.dot(chunk, weights[k], total)
    return total


@triton.jit
def _forward(
    x, weight, bias, act, pre, rows, lanes,
    INSIDE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CUT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = HIDDEN // COLUMNS  # neighbours share tokens, which the second finds in the cache
    lane, column = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS
    weights = _weights(weight, column, INSIDE, HIDDEN, COLUMNS, CHUNK, True)
    shift = tl.load(bias + column + tl.arange(0, COLUMNS)).to(tl.float32)[None, :]
    places = tl.arange(0, ROWS)[:, None] * HIDDEN + tl.arange(0, COLUMNS)[None, :]
    for start in tl.range(lane * ROWS, rows, lanes * ROWS, num_stages=STAGES):
        there = (tl.arange(0, ROWS) < rows - start)[:, None] if CUT else None
        here = tl.cast(start, tl.int64) * HIDDEN + column
        h = _product(x, start, there, weights, INSIDE, ROWS, COLUMNS, CHUNK) + shift
        if KEPT:
            tl.store(pre + here + places, h.to(pre.dtype.element_ty), mask=there)
        tl.store(act + here + places, gelu(h).to(act.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    grad, weight, pre, into, sums, act, rows, lanes,
    INSIDE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CUT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = HIDDEN // COLUMNS
    lane, column = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS
    weights = _weights(weight, column, INSIDE, HIDDEN, COLUMNS, CHUNK, False)
    columns = column + tl.arange(0, COLUMNS)
    places = tl.arange(0, ROWS)[:, None] * HIDDEN + tl.arange(0, COLUMNS)[None, :]
    for start in tl.range(lane * ROWS, rows, lanes * ROWS, num_stages=STAGES):
        there = (tl.arange(0, ROWS) < rows - start)[:, None] if CUT else None
        here = tl.cast(start, tl.int64) * HIDDEN + column
        h = tl.load(pre + here + places, mask=there, other=0.0 if CUT else None)  # on its way during the product
        if AGAIN:
            tl.store(act + here + places, gelu(h.to(tl.float32)).to(act.dtype.element_ty), mask=there)
        g = _product(grad, start, there, weights, INSIDE, ROWS, COLUMNS, CHUNK) * _slope(h.to(tl.float32))
        tl.store(into + here + places, g.to(into.dtype.element_ty), mask=there)
        # Sums kept from tile to tile would take the registers of a third program: they are written for each.
        tl.store(sums + tl.cast(start // ROWS, tl.int64) * HIDDEN + columns, tl.sum(g, 0))


def forward(x: Tensor, weight: Tensor, bias: Tensor, act: Tensor, pre: Tensor, tile: Tile) -> None:
    """Write GELU(h), and h unless its tensor is empty; all are contiguous."""
    hidden, inside = weight.shape
    grid, options = _cut(x.numel() // inside, inside, hidden, tile)
    with torch.cuda.device_of(x):  # Triton launches where the current device is
        _forward[grid](x, weight, bias, act, pre, KEPT=pre.numel() > 0, **options)


def backward(grad: Tensor, weight: Tensor, pre: Tensor, into: Tensor, sums: Tensor, act: Tensor, tile: Tile) -> None:
    """Write the gradient of h, for every `tile.rows` tokens its sums, and GELU(h) unless its tensor is empty.

    All are contiguous.
    """
    inside, hidden = weight.shape
    grid, options = _cut(grad.numel() // inside, inside, hidden, tile)
    with torch.cuda.device_of(grad):
        _backward[grid](grad, weight, pre, into, sums, act, AGAIN=act.numel() > 0, **options)


def _cut(rows: int, inside: int, hidden: int, tile: Tile) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and what both kernels are told."""
    across = hidden // tile.columns
    lanes = min(max(1, tile.programs // across), tiles_of(rows, tile.rows))
    options = {
        "rows": rows,
        "lanes": lanes,
        "INSIDE": inside,
        "HIDDEN": hidden,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "CHUNK": CHUNK,
        "STAGES": tile.stages,
        "CUT": rows % tile.rows > 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.registers,
    }
    return (lanes * across,), options
