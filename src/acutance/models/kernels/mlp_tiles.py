"""The kernels of `mlp`. Products are summed in float32. GELU is taken of the rounded h, which is also what is kept.

In the forward pass a program takes some tokens through the whole hidden layer, some channels at a time. In the backward
pass it reads the weights of its hidden channels once and loops over tiles of tokens. It multiplies all channels of a
token, chunk by chunk, so that nothing is summed across programs. Fused multiply-adds are written out, because newer
compilers do not make them by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.sizes import tiles_of
from acutance.models.kernels.mlp import CHUNK, COEFFICIENTS, FARTHEST, Tile

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
    """|x| up to FAR. NaN stays NaN, and so does all that is computed from it."""
    return tl.minimum(tl.abs(x), FAR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(x):
    """GELU(x) by the polynomial."""
    a = _distance(x)
    return tl.maximum(x, 0.0) - a * _beyond(a)


@triton.jit
def _slope(x):
    """GELU'(x) = Φ(x) + x φ(x); GELU'(−x) = 1 − GELU'(x)."""
    a = _distance(x)
    density = tl.exp2(tl.fma(a * a, -HALF_LOG2_E, -LOG2_ROOT_TAU))
    left = _beyond(a) - a * density  # at −a
    return tl.where(x > 0, 1.0 - left, left)


@triton.jit
def _weights(weight, column, INSIDE: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The weights of the hidden channels from `column` on, (CHUNK, COLUMNS) each."""
    chunks = ()
    columns, inner = column + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    for k in tl.static_range(INSIDE // CHUNK):
        chunks += (tl.load(weight + (k * CHUNK + inner)[:, None] * HIDDEN + columns[None, :]),)  # type: ignore[assignment]
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
    x, up, shift, down, offset, out, pre, rows,
    INSIDE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CUT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = INSIDE // CHUNK  # the sides of tiles are powers of two, 192 is not
    start = tl.program_id(0) * ROWS
    row, inner, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    there = row < rows - start if CUT else None
    x += tl.cast(start, tl.int64) * INSIDE
    out += tl.cast(start, tl.int64) * INSIDE
    pre += tl.cast(start, tl.int64) * HIDDEN
    tokens, sums = (), ()
    for k in tl.static_range(PARTS):
        places = row * INSIDE + (k * CHUNK + inner)[None, :]
        tokens += (tl.load(x + places, mask=there, other=0.0 if CUT else None),)  # type: ignore[assignment]
        sums += (tl.zeros((ROWS, CHUNK), tl.float32),)  # type: ignore[assignment]
    for column in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        h = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.static_range(PARTS):
            weights = tl.load(up + (column + columns)[:, None] * INSIDE + (k * CHUNK + inner)[None, :])
            h = tl.dot(tokens[k], weights.T, h)
        h = (h + tl.load(shift + column + columns).to(tl.float32)[None, :]).to(x.dtype.element_ty)
        if KEPT:
            tl.store(pre + row * HIDDEN + (column + columns)[None, :], h, mask=there)
        act = gelu(h.to(tl.float32)).to(x.dtype.element_ty)
        more = ()
        for k in tl.static_range(PARTS):
            last = tl.load(down + (k * CHUNK + inner)[:, None] * HIDDEN + (column + columns)[None, :])
            more += (tl.dot(act, last.T, sums[k]),)  # type: ignore[assignment]
        sums = more
    for k in tl.static_range(PARTS):
        y = sums[k] + tl.load(offset + k * CHUNK + inner).to(tl.float32)[None, :]
        tl.store(out + row * INSIDE + (k * CHUNK + inner)[None, :], y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    grad, weight, pre, into, sums, act, rows, lanes,
    INSIDE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CUT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = HIDDEN // COLUMNS
    lane, column = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS
    weights = _weights(weight, column, INSIDE, HIDDEN, COLUMNS, CHUNK)
    columns = column + tl.arange(0, COLUMNS)
    places = tl.arange(0, ROWS)[:, None] * HIDDEN + tl.arange(0, COLUMNS)[None, :]
    for start in tl.range(lane * ROWS, rows, lanes * ROWS, num_stages=STAGES):
        there = (tl.arange(0, ROWS) < rows - start)[:, None] if CUT else None
        here = tl.cast(start, tl.int64) * HIDDEN + column
        h = tl.load(pre + here + places, mask=there, other=0.0 if CUT else None)  # loaded during the product
        if AGAIN:
            tl.store(act + here + places, gelu(h.to(tl.float32)).to(act.dtype.element_ty), mask=there)
        g = _product(grad, start, there, weights, INSIDE, ROWS, COLUMNS, CHUNK) * _slope(h.to(tl.float32))
        tl.store(into + here + places, g.to(into.dtype.element_ty), mask=there)
        # Sums are written for each tile: keeping them would take the registers of a third program.
        tl.store(sums + tl.cast(start // ROWS, tl.int64) * HIDDEN + columns, tl.sum(g, 0))


def forward(
    x: Tensor, up: Tensor, shift: Tensor, down: Tensor, offset: Tensor, out: Tensor, pre: Tensor, tile: Tile
) -> None:
    """Write GELU(h) Wᵀ + c, and h unless its tensor is empty; all are contiguous."""
    hidden, inside = up.shape
    rows = x.numel() // inside
    with torch.cuda.device_of(x):  # Triton launches where the current device is
        _forward[(tiles_of(rows, tile.rows),)](
            x, up, shift, down, offset, out, pre, rows, KEPT=pre.numel() > 0, **_cut(rows, inside, hidden, tile)
        )


def backward(grad: Tensor, weight: Tensor, pre: Tensor, into: Tensor, sums: Tensor, act: Tensor, tile: Tile) -> None:
    """Write the gradient of h, its sums over every `tile.rows` tokens, and GELU(h) unless its tensor is empty.

    All are contiguous.
    """
    inside, hidden = weight.shape
    rows, across = grad.numel() // inside, hidden // tile.columns
    lanes = min(max(1, tile.programs // across), tiles_of(rows, tile.rows))
    with torch.cuda.device_of(grad):
        _backward[(lanes * across,)](
            grad, weight, pre, into, sums, act, rows, lanes, AGAIN=act.numel() > 0, **_cut(rows, inside, hidden, tile)
        )


def _cut(rows: int, inside: int, hidden: int, tile: Tile) -> dict[str, Any]:
    """The constants that both kernels are compiled for."""
    return {
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
