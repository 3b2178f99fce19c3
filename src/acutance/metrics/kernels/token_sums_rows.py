"""The kernels of `token_sums`: a program sums the tokens of a sample, or of a part of one, in registers.

Each row of the tile keeps its own sums until the end, so that threads synchronise only for the length of a token. For
16-bit numbers (SHORT) float64 holds products exactly and hardly rounds their sums, so the first token is subtracted
once, at the end. If a sample is cut into parts, a second kernel adds them, always in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.launching import Launch, is_current, placement
from acutance.attention.kernels.sizes import power_of_two, tiles_of
from acutance.metrics.kernels.token_sums import FIELDS, parts_of

TILE = 1024  # numbers in a tile of whole tokens: 16 bytes of half precision per thread
DEEP = 4  # tiles that a program takes at a time, so that the lengths of several tokens are found in parallel
WIDE = 2048  # a token of this many channels or more takes all threads, so tokens are taken one at a time
STAGES = 3  # tiles that the second kernel loads at once
MERGED = 2048  # with more channels the tiles of the second kernel would fill shared memory
NUMBERS = 7  # numbers that a part hands over beside its two vectors
OUT = tl.constexpr(len(FIELDS))
SCANNED = tl.constexpr(1024)  # entries of a mask searched at a time


@triton.jit
def _origin(x, mask, sample, tokens, x_sample, x_token, mask_sample, mask_token, columns, inside, MASKED: tl.constexpr):
    """The first counted token, or else the first one, and its length."""
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


@triton.jit
def _total(tile):
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def _take(
    x, mask, row, end, x_token, mask_token, columns,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tokens from `row` on, which of them count, and their places. Others are never read."""
    places = row + DEEP * tl.arange(0, ROWS)[:, None] + tl.arange(0, DEEP)[None, :]
    counts = places < end
    if MASKED:
        counts = tl.load(mask + places * mask_token, counts, other=0) & counts
    inside = counts[:, :, None] & (columns[None, None, :] < WIDTH)
    tile = tl.load(x + places.to(tl.int64)[:, :, None] * x_token + columns[None, None, :], inside, other=0.0)
    return tile, counts, places


@triton.jit(do_not_specialize=["tokens", "share", "mask_sample", "mask_token"])
def _sum(
    x, mask, vectors, numbers, out, tokens, share, x_sample, x_token, mask_sample, mask_token,
    MASKED: tl.constexpr, SHORT: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    DEEP: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    sample, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    start = part * share
    end = tl.minimum(start + share, tokens)
    own, own_mask = x + sample * x_sample, mask + sample * mask_sample
    taken, taken_counts, taken_places = _take(
        own, own_mask, start, end, x_token, mask_token, columns, MASKED, WIDTH, DEEP, ROWS
    )
    origin, origin_length = _origin(
        x, mask, sample, tokens, x_sample, x_token, mask_sample, mask_token, columns, inside, MASKED
    )
    directions = tl.zeros((ROWS, PADDED), tl.float64)
    away = tl.zeros((ROWS, PADDED), tl.float64)
    squares = tl.zeros((ROWS, DEEP) if SHORT else (ROWS, PADDED), tl.float64)
    longer = tl.zeros((ROWS, DEEP), tl.float64)
    longer_squares = tl.zeros((ROWS, DEEP), tl.float64)
    counted, nonzero = tl.zeros((ROWS, DEEP), tl.int32), tl.zeros((ROWS, DEEP), tl.int32)
    bad = tl.zeros((ROWS, DEEP), tl.int32)
    first_bad = tl.full((ROWS, DEEP), 0, tl.int32) + tokens
    for row in tl.range(start, end, DEEP * ROWS, num_stages=1):
        tile, counts, places = taken.to(tl.float64), taken_counts, taken_places
        # The next tokens are loaded while these are worked on.
        taken, taken_counts, taken_places = _take(
            own, own_mask, row + DEEP * ROWS, end, x_token, mask_token, columns, MASKED, WIDTH, DEEP, ROWS
        )
        square = tl.sum(tile * tile, 2)
        directed = square > 0
        inverse = tl.where(directed, tl.rsqrt(tl.where(directed, square, 1.0)), 0.0)
        directions += tl.sum(tile * inverse[:, :, None], 1)
        if SHORT:
            away += tl.sum(tile, 1)
            squares += square
        else:
            shifted = tl.where(counts[:, :, None], tile - origin[None, None, :], 0.0)
            away += tl.sum(shifted, 1)
            squares += tl.sum(shifted * shifted, 1)
        more = tl.where(counts, square * inverse - origin_length, 0.0)
        longer += more
        longer_squares += more * more
        spoilt = (square < float("inf")) == 0  # float64 holds the squares of all finite inputs
        counted += counts.to(tl.int32)
        nonzero += directed.to(tl.int32)
        bad += spoilt.to(tl.int32)
        first_bad = tl.minimum(first_bad, tl.where(spoilt, places, tokens))
    all_directions, all_away, all_squares = tl.sum(directions, 0), tl.sum(away, 0), _total(squares)
    all_longer, all_longer_squares, count = _total(longer), _total(longer_squares), _total(counted)
    all_nonzero, all_bad, first = _total(nonzero), _total(bad), tl.min(tl.min(first_bad, 1), 0)
    if SHORT:
        all_squares += tl.sum(origin * (count * origin - 2.0 * all_away), 0)
        all_away -= count * origin
    if WHOLE:
        _finish(
            out, sample, origin, origin_length, all_directions, all_away, all_squares, all_longer, all_longer_squares,
            count.to(tl.float64), all_nonzero, all_bad, first,
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
    """How tokens of one kind are read. It is made once, because readings are so short that CPU time matters."""

    parts: int  # per sample
    share: int  # tokens per part
    first: Launch
    second: Launch


@lru_cache(256)
def _plan(shape: tuple[int, ...], dtype: torch.dtype, masked: bool, *_compiled_for: object) -> _Plan:
    """Strides and placement only tell cached plans apart."""
    samples, count, width = shape
    padded = power_of_two(width)
    rows, deep = max(1, TILE // padded), DEEP if padded < WIDE else 1
    parts = parts_of(samples, count, rows * deep)
    kind = {
        "MASKED": masked,
        "WIDTH": width,
        "PADDED": padded,
        "ROWS": rows,
        "NUMBERS": NUMBERS,
        "num_warps": 4 if padded < WIDE else 8 if padded == WIDE else 16,
    }
    return _Plan(
        parts,
        tiles_of(tiles_of(count, rows * deep), parts) * rows * deep,
        Launch(_sum, (samples, parts), {**kind, "DEEP": deep, "SHORT": dtype.itemsize == 2, "WHOLE": parts == 1}),
        Launch(_merge, (samples,), {**kind, "PARTS": power_of_two(parts), "STAGES": STAGES if padded <= MERGED else 1}),
    )


def token_sums(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Launch one kernel, or two where there are too few samples to fill the GPU."""
    device = tokens.device
    if not is_current(device):
        with torch.cuda.device(device):
            return token_sums(tokens, mask)
    if tokens.stride(-1) != 1:
        tokens = tokens.contiguous()
    shape, marks = tokens.shape, tokens if mask is None else mask
    strides = (*tokens.stride()[:2], *((0, 0) if mask is None else mask.stride()))
    plan = _plan(shape, tokens.dtype, mask is not None, strides, placement(tokens, marks))
    out = torch.empty(shape[0], len(FIELDS), dtype=torch.float64, device=device)
    vectors = numbers = out  # any tensor stands in for what is not written
    if plan.parts > 1:
        vectors = out.new_empty(shape[0], plan.parts, 2, shape[2])
        numbers = out.new_empty(shape[0], plan.parts, NUMBERS)
    tensors = (tokens, marks, vectors, numbers, out)
    plan.first(tensors, shape[1], plan.share, *strides)
    if plan.parts > 1:
        plan.second(tensors, shape[1], plan.parts, *strides)
    return out
