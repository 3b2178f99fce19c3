"""The kernels of `residual_norm`: a program holds whole tokens in registers, padded to a power of two.

Everything is computed in float32 from inputs of any precision. As many programs as fit on the GPU share the tokens.
Backwards each keeps its own sums for γ and β, so that few remain to be added up, and always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.residual_norm import programs_for, rows_at_a_time

FORWARD_PROGRAMS = 660  # at most: five for each of Hopper's 132 multiprocessors
WARPS = 8
STAGES = 1  # above 1 tokens are asked for while those before them are worked on, for barriers and shared memory


@triton.jit
def _places(start, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Which tokens, which of them there are, where their channels stand, and which of these there are."""
    rows, columns = start + tl.arange(0, ROWS), tl.arange(0, PADDED)
    there = rows < count
    place = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    return rows, there, place, there[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def _factors(keep, rows, tokens, there):
    """Of each token, its sample's factor."""
    return tl.load(keep + rows // tokens, there, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _forward(
    x, branch, keep, weight, bias, total, normed, means, rstds, count, tokens, programs, eps,
    KEPT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    gain = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, inside, other=0.0).to(tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, count, programs * ROWS, num_stages=STAGES):
        rows, there, place, mask = _places(start, count, WIDTH, PADDED, ROWS)
        added = tl.load(branch + place, mask, other=0.0).to(tl.float32)
        if KEPT:
            added *= _factors(keep, rows, tokens, there)
        summed = tl.load(x + place, mask, other=0.0).to(tl.float32) + added
        rounded = summed.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask)
        tile = rounded.to(tl.float32)  # the norm is that of the sum as it is kept
        mean = tl.sum(tile, 1) * (1.0 / WIDTH)
        centred = tl.where(inside[None, :], tile - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) * (1.0 / WIDTH) + eps)
        out = centred * rstd[:, None] * gain[None, :] + shift[None, :]
        tl.store(normed + place, out.to(normed.dtype.element_ty), mask)
        tl.store(means + rows, mean, there)
        tl.store(rstds + rows, rstd, there)


@triton.jit
def _backward(
    grad_total, grad_normed, total, means, rstds, weight, keep, grad_x, grad_branch, partial, count, tokens, programs,
    KEPT: tl.constexpr, APART: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program, columns = tl.program_id(0), tl.arange(0, PADDED)
    inside = columns < WIDTH
    gain = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    of_gain = tl.zeros((ROWS, PADDED), tl.float32)
    of_shift = tl.zeros((ROWS, PADDED), tl.float32)
    for start in tl.range(program * ROWS, count, programs * ROWS, num_stages=STAGES):
        rows, there, place, mask = _places(start, count, WIDTH, PADDED, ROWS)
        # Zero where nothing is, and so is everything made of it that is summed up.
        grad = tl.load(grad_normed + place, mask, other=0.0).to(tl.float32)
        tile = tl.load(total + place, mask, other=0.0).to(tl.float32)
        change = tl.load(grad_total + place, mask, other=0.0).to(tl.float32)
        mean, rstd = tl.load(means + rows, there, other=0.0), tl.load(rstds + rows, there, other=0.0)
        unit = (tile - mean[:, None]) * rstd[:, None]
        of_gain += grad * unit
        of_shift += grad
        pull = grad * gain[None, :]
        level, along = tl.sum(pull, 1) * (1.0 / WIDTH), tl.sum(pull * unit, 1) * (1.0 / WIDTH)
        change += rstd[:, None] * (pull - level[:, None] - unit * along[:, None])
        tl.store(grad_x + place, change.to(grad_x.dtype.element_ty), mask)
        if APART:
            if KEPT:
                change *= _factors(keep, rows, tokens, there)
            tl.store(grad_branch + place, change.to(grad_branch.dtype.element_ty), mask)
    into = partial + program * (2 * WIDTH) + columns
    tl.store(into, tl.sum(of_gain, 0), inside)
    tl.store(into + WIDTH, tl.sum(of_shift, 0), inside)


def forward(
    x: Tensor,
    branch: Tensor,
    keep: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    total: Tensor,
    normed: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    """Write the sum, its norm, and the tokens' means and inverse deviations."""
    width, count = x.shape[-1], mean.numel()
    programs = programs_for(count, width, FORWARD_PROGRAMS)
    with torch.cuda.device_of(x):  # Triton launches where the current device is
        _forward[(programs,)](
            *(x, branch),
            x if keep is None else keep,  # any tensor in the place of what is not read
            *(weight, bias, total, normed, mean, rstd),
            *(count, _tokens(count, keep), programs, eps),
            KEPT=keep is not None,
            **_kind(width),
            num_warps=WARPS,
        )


def backward(
    grad_total: Tensor,
    grad_normed: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    keep: Tensor | None,
    grad_x: Tensor,
    grad_branch: Tensor,
    partial: Tensor,
) -> None:
    """Write the gradients of x and of the branch, and each program's part of those of γ and β."""
    width, count, programs = total.shape[-1], mean.numel(), partial.shape[0]
    with torch.cuda.device_of(total):
        _backward[(programs,)](
            *(grad_total, grad_normed, total, mean, rstd, weight),
            total if keep is None else keep,
            *(grad_x, grad_branch, partial),
            *(count, _tokens(count, keep), programs),
            KEPT=keep is not None,
            APART=grad_branch.numel() > 0,
            **_kind(width),
            num_warps=WARPS,
        )


def _kind(width: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    return {
        "WIDTH": width,
        "PADDED": triton.next_power_of_2(width),
        "ROWS": rows_at_a_time(width),
        "STAGES": STAGES,
    }


def _tokens(count: int, keep: Tensor | None) -> int:
    """Of one sample."""
    return 1 if keep is None else count // keep.numel()
