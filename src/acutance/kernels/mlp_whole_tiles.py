"""The kernel of `mlp` that goes from tokens to tokens: the hidden layer stays in registers, some channels at a time.

h is rounded before its GELU is taken, as it is kept, so that GELU(h) made again from it has the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.mlp import CHUNK, Tile
from acutance.kernels.mlp_tiles import gelu
from acutance.kernels.sizes import tiles_of


@triton.jit
def _forward(
    x, up, shift, down, offset, out, pre, rows,
    INSIDE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CUT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = INSIDE // CHUNK  # tiles have powers of two for sides, 192 channels do not
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


def forward(
    x: Tensor, up: Tensor, shift: Tensor, down: Tensor, offset: Tensor, out: Tensor, pre: Tensor, tile: Tile
) -> None:
    """Write GELU(h) Wᵀ + c, and h unless its tensor is empty; all are contiguous."""
    hidden, inside = up.shape
    rows = x.numel() // inside
    with torch.cuda.device_of(x):  # Triton launches where the current device is
        _forward[(tiles_of(rows, tile.rows),)](
            x, up, shift, down, offset, out, pre, rows, INSIDE=inside, HIDDEN=hidden, ROWS=tile.rows,
            COLUMNS=tile.columns, CHUNK=CHUNK, STAGES=tile.stages, CUT=rows % tile.rows > 0, KEPT=pre.numel() > 0,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
