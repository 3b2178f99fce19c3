"""The kernels of `token_sums`: a program sums up the tokens of a sample, or of a part of one, held whole in registers.

Sums over tokens stay apart by row of the tile until the end, so that threads meet only to find the length of a token.
Where a sample is cut into parts, a second kernel adds these up, always in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.kernels.sizes import power_of_two, tiles_of
from acutance.kernels.token_sums import FIELDS, parts_of

TILE = 2048  # numbers a program takes at a time, whole tokens: 16 bytes of half precision a thread
STAGES = 3  # so many tiles are on their way at once: tokens are asked for while those before them are worked on
MERGED = 2048  # up to so many channels the second kernel does the same; of more, its tiles would fill shared memory
REGISTERS = 128  # of a thread, so that a multiprocessor holds 16 warps
NUMBERS = 7  # that a part hands over beside its two vectors
OUT = tl.constexpr(len(FIELDS))
SCANNED = tl.constexpr(1024)  # entries of a mask looked through at a time


@triton.jit
def _origin(x, mask, sample, tokens, x_sample, x_token, mask_sample, mask_token, columns, inside, MASKED: tl.constexpr):
    """The first token that counts, or else the first, and its length."""
    first = 0
    if MASKED:
        first = tokens
        for start in range(0, tokens, SCANNED):
            places = start + tl.arange(0, SCANNED)
            counts = tl.load(mask + sample * mask_sample + places * mask_token, places < tokens, other=0)
            first = tl.minimum(first, tl.min(tl.where(counts, places, tokens), 0))
        first = tl.where(first < tokens, first, 0).to(tl.int64)
    origin = tl.load(x + sample * x_sample + first * x_token + columns, inside, other=0.0).to(tl.float64)
    return origin, tl.sqrt(tl.sum(origin * origin, 0))


@triton.jit
def _finish(
    out, sample, origin, length, directions, away, squares, longer, longer_squares, count, nonzero, bad, first_bad
):  # fmt: skip
    """Write the fields of a sample."""
    n = tl.maximum(count, 1.0)
    there = count > 0
    mean = away / n
    token = tl.where(there, origin + mean, 0.0)
    into = out + sample * OUT
    tl.store(into, count)
    tl.store(into + 1, bad)
    tl.store(into + 2, first_bad)
    tl.store(into + 3, tl.sum(directions * directions, 0) - nonzero)
    tl.store(into + 4, tl.maximum(squares - tl.sum(away * mean, 0), 0.0))
    tl.store(into + 5, n * tl.sum(token * token, 0))
    tl.store(into + 6, tl.where(there, length + longer / n, 0.0))
    tl.store(into + 7, tl.maximum(longer_squares / n - (longer / n) * (longer / n), 0.0))


@triton.jit(do_not_specialize=["tokens", "share", "mask_sample", "mask_token"])
def _sum(
    x, mask, vectors, numbers, out, tokens, share, x_sample, x_token, mask_sample, mask_token,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    NUMBERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns, steps = tl.arange(0, PADDED), tl.arange(0, ROWS)
    inside = columns < WIDTH
    origin, origin_length = _origin(
        x, mask, sample, tokens, x_sample, x_token, mask_sample, mask_token, columns, inside, MASKED
    )
    directions = tl.zeros((ROWS, PADDED), tl.float64)
    away = tl.zeros((ROWS, PADDED), tl.float64)
    squares = tl.zeros((ROWS, PADDED), tl.float64)
    longer = tl.zeros((ROWS,), tl.float64)
    longer_squares = tl.zeros((ROWS,), tl.float64)
    counted, nonzero, bad = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    first_bad = tl.full((ROWS,), 0, tl.int32) + tokens
    start = part * share
    for row in tl.range(start, tl.minimum(start + share, tokens), ROWS, num_stages=STAGES):
        places = row + steps
        counts = places < tokens
        if MASKED:
            counts = tl.load(mask + sample * mask_sample + places * mask_token, counts, other=0) & counts
        # What does not count is never read.
        tile = tl.load(
            x + sample * x_sample + places.to(tl.int64)[:, None] * x_token + columns[None, :],
            counts[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float64)
        square = tl.sum(tile * tile, 1)
        length = tl.sqrt(square)
        directed = square > 0
        directions += tile * tl.where(directed, 1.0 / tl.where(directed, length, 1.0), 0.0)[:, None]
        shifted = tl.where(counts[:, None], tile - origin[None, :], 0.0)
        away += shifted
        squares += shifted * shifted
        more = tl.where(counts, length - origin_length, 0.0)
        longer += more
        longer_squares += more * more
        spoilt = (square < float("inf")) == 0  # float64 holds the squares of all finite numbers read here
        counted += counts.to(tl.int32)
        nonzero += directed.to(tl.int32)
        bad += spoilt.to(tl.int32)
        first_bad = tl.minimum(first_bad, tl.where(spoilt, places, tokens))
    all_directions, all_away, all_squares = tl.sum(directions, 0), tl.sum(away, 0), tl.sum(tl.sum(squares, 0), 0)
    all_longer, all_longer_squares = tl.sum(longer, 0), tl.sum(longer_squares, 0)
    count, all_nonzero = tl.sum(counted, 0).to(tl.float64), tl.sum(nonzero, 0).to(tl.float64)
    all_bad, first = tl.sum(bad, 0).to(tl.float64), tl.min(first_bad, 0).to(tl.float64)
    if WHOLE:
        _finish(
            out, sample, origin, origin_length, all_directions, all_away, all_squares, all_longer, all_longer_squares,
            count, all_nonzero, all_bad, first,
        )  # fmt: skip
    else:
        place = sample * parts + part
        into = vectors + place * (2 * WIDTH) + columns
        tl.store(into, all_directions, inside)
        tl.store(into + WIDTH, all_away, inside)
        number = numbers + place * NUMBERS
        tl.store(number, all_squares)
        tl.store(number + 1, all_longer)
        tl.store(number + 2, all_longer_squares)
        tl.store(number + 3, count)
        tl.store(number + 4, all_nonzero)
        tl.store(number + 5, all_bad)
        tl.store(number + 6, first)


@triton.jit
def _summed(numbers, places, there, FIELD: tl.constexpr, NUMBERS: tl.constexpr):
    return tl.sum(tl.load(numbers + places * NUMBERS + FIELD, there, other=0.0), 0)


@triton.jit(do_not_specialize=["tokens", "parts", "mask_sample", "mask_token"])
def _merge(
    x, mask, vectors, numbers, out, tokens, parts, x_sample, x_token, mask_sample, mask_token,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    NUMBERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    columns, steps = tl.arange(0, PADDED), tl.arange(0, ROWS)
    inside = columns < WIDTH
    directions, away = tl.zeros((ROWS, PADDED), tl.float64), tl.zeros((ROWS, PADDED), tl.float64)
    for row in tl.range(0, parts, ROWS, num_stages=STAGES):
        there = (row + steps < parts)[:, None] & inside[None, :]
        place = vectors + (sample * parts + row + steps)[:, None] * (2 * WIDTH) + columns[None, :]
        directions += tl.load(place, there, other=0.0)
        away += tl.load(place + WIDTH, there, other=0.0)
    every = tl.arange(0, PARTS)
    there = every < parts
    places = sample * parts + every
    first = tl.min(tl.load(numbers + places * NUMBERS + 6, there, other=float("inf")), 0)
    origin, origin_length = _origin(
        x, mask, sample, tokens, x_sample, x_token, mask_sample, mask_token, columns, inside, MASKED
    )
    _finish(
        out, sample, origin, origin_length, tl.sum(directions, 0), tl.sum(away, 0),
        _summed(numbers, places, there, 0, NUMBERS), _summed(numbers, places, there, 1, NUMBERS),
        _summed(numbers, places, there, 2, NUMBERS), _summed(numbers, places, there, 3, NUMBERS),
        _summed(numbers, places, there, 4, NUMBERS), _summed(numbers, places, there, 5, NUMBERS), first,
    )  # fmt: skip


class _Plan(NamedTuple):
    """How tokens of one shape are read: made once, since readings are so short that the host's arithmetic is felt."""

    parts: int  # of a sample
    share: int  # tokens of a part
    first: dict[str, Any]  # what the first kernel is compiled for, and the second
    second: dict[str, Any]


@lru_cache(256)
def _plan(samples: int, count: int, width: int, masked: bool) -> _Plan:
    padded = power_of_two(width)
    rows = max(1, TILE // padded)
    parts = parts_of(samples, count, rows)
    kind = {
        "MASKED": masked,
        "WIDTH": width,
        "PADDED": padded,
        "ROWS": rows,
        "NUMBERS": NUMBERS,
        "num_warps": 8 if padded <= 2048 else 16,
        "maxnreg": REGISTERS,
    }
    first = {**kind, "WHOLE": parts == 1, "STAGES": STAGES}
    second = {**kind, "PARTS": power_of_two(parts), "STAGES": STAGES if padded <= MERGED else 1}
    return _Plan(parts, tiles_of(tiles_of(count, rows), parts) * rows, first, second)


def token_sums(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Launch one kernel, or two where there are too few samples to fill the GPU."""
    if tokens.stride(-1) != 1:
        tokens = tokens.contiguous()
    samples, count, width = tokens.shape
    plan = _plan(samples, count, width, mask is not None)
    out = torch.empty(samples, len(FIELDS), dtype=torch.float64, device=tokens.device)
    strides = (*tokens.stride()[:2], *((0, 0) if mask is None else mask.stride()))
    vectors = numbers = out  # any tensor in the place of what is not written
    if plan.parts > 1:
        vectors, numbers = out.new_empty(samples, plan.parts, 2, width), out.new_empty(samples, plan.parts, NUMBERS)
    given = (tokens, tokens if mask is None else mask, vectors, numbers, out, count)
    with torch.cuda.device_of(tokens):  # Triton launches where the current device is
        _sum[(samples, plan.parts)](*given, plan.share, *strides, **plan.first)
        if plan.parts > 1:
            _merge[(samples,)](*given, plan.parts, *strides, **plan.second)
    return out
