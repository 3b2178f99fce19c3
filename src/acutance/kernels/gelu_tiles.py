"""The kernels of `gelu`. They read and write 16 bytes a thread at a time, and compute in float32.

Multiplying and adding at once is asked for by name: newer compilers do not join the two by themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.gelu import CHUNK, COEFFICIENTS, FARTHEST

POWERS = tl.constexpr(COEFFICIENTS)
DEGREE = tl.constexpr(len(COEFFICIENTS) - 1)
FAR = tl.constexpr(FARTHEST)
HALF_LOG2_E = tl.constexpr(0.7213475204444817)  # log₂ √e
LOG2_ROOT_TAU = tl.constexpr(1.3257480647361593)  # log₂ √(2π)
WIDEST = 256  # columns of a tile: 8 of each thread of a warp


class Tile(NamedTuple):
    """How the backward pass is cut: rows at a time, warps, how many tiles are on their way at once, registers.

    Left to itself the compiler saves registers by asking for the gradient only when GELU' is there.
    """

    rows: int = 4
    warps: int = 4
    stages: int = 1
    registers: int | None = 48


class Block(NamedTuple):
    """How the forward pass is cut: elements of a program, and warps."""

    size: int = 2048
    warps: int = 4


TILE, BLOCK = Tile(), Block()


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
def _gelu(x):
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
def _forward(pre, act, count, SIZE: tl.constexpr, CUT: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE
    places = tl.arange(0, SIZE)
    inside = places < count - start if CUT else None
    x = tl.load(pre + start + places, mask=inside).to(tl.float32)
    tl.store(act + start + places, _gelu(x).to(act.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, pre, into, sums, rows,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    CUT: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """One program goes through CHUNK rows of WIDE columns, and keeps the sums of each thread's in registers."""
    across: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    chunk, column = tl.program_id(0) // across, tl.program_id(0) % across * WIDE
    row, columns = tl.arange(0, ROWS)[:, None], (column + tl.arange(0, WIDE))[None, :]
    start = chunk.to(tl.int64) * CHUNK * COLUMNS
    places = row * COLUMNS + columns
    left = rows - chunk * CHUNK
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for done in tl.range(0, CHUNK, ROWS, num_stages=STAGES):
        inside = (row + done < left) & (columns < COLUMNS) if CUT else None
        here = start + done * COLUMNS
        x = tl.load(pre + here + places, mask=inside, other=0.0 if CUT else None).to(tl.float32)
        g = tl.load(grad + here + places, mask=inside, other=0.0 if CUT else None).to(tl.float32)
        g *= _slope(x)
        tl.store(into + here + places, g.to(into.dtype.element_ty), mask=inside)
        total += g
    if SUMMED:
        summed = tl.sum(total, 0)[None, :]
        tl.store(sums + chunk.to(tl.int64) * COLUMNS + columns, summed, mask=columns < COLUMNS)


def forward(pre: Tensor, block: Block = BLOCK) -> Tensor:
    """GELU of a contiguous tensor."""
    act = torch.empty_like(pre)
    count = pre.numel()
    with torch.cuda.device_of(pre):  # Triton launches where the current device is
        _forward[(triton.cdiv(count, block.size),)](
            pre, act, count, SIZE=block.size, CUT=count % block.size > 0, num_warps=block.warps
        )
    return act


def backward(grad: Tensor, pre: Tensor, summed: bool, tile: Tile = TILE, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The gradient of `pre`, both contiguous, and its sums over each `chunk` of rows; empty unless `summed`."""
    columns = pre.shape[-1]
    rows = pre.numel() // columns
    chunks, wide = triton.cdiv(rows, chunk), min(WIDEST, triton.next_power_of_2(columns))
    into = torch.empty_like(pre)
    sums = torch.empty((chunks, columns) if summed else 0, dtype=torch.float32, device=pre.device)
    with torch.cuda.device_of(pre):
        _backward[(chunks * triton.cdiv(columns, wide),)](
            *(grad, pre, into, sums, rows),
            COLUMNS=columns,
            ROWS=tile.rows,
            WIDE=wide,
            CHUNK=chunk,
            STAGES=tile.stages,
            CUT=rows % chunk > 0 or columns % wide > 0,
            SUMMED=summed,
            num_warps=tile.warps,
            maxnreg=tile.registers,
        )
    return into, sums
