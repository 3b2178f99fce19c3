"""What the kernels for long sequences share: tile sizes, the order of programs, reading and writing of rows.

A tile that is `CUT` may reach beyond the last token; whole tiles are read and written without masks. Offsets in memory
have 64 bits: a long sequence can have more than 2³¹ numbers and still fit on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.packed_tiles import mixed

CACHE_BYTES = 2**24  # what the heads at work together may read repeatedly, so that it stays in the GPU's cache

COUNTS = ("tiles", "together", "at_a_time")  # arguments whose change compiles no kernel again


class Tile(NamedTuple):
    """How one kernel is cut and compiled.

    Attributes:
        queries: per tile.
        keys: per tile. They divide the queries where a program owns queries; else the queries divide them.
        warps: per program.
        stages: tiles being loaded at a time.
        registers: at most per thread, so that more programs run at once; None leaves it to the compiler.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    def options(self) -> dict[str, int | None]:
        """The options of a launch."""
        return {
            "QUERIES": self.queries,
            "KEYS": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


def chosen(tiles: dict[tuple[int, int], Tile], qkv: Tensor, width: int, plain: bool) -> Tile:
    """The tile for numbers of this many bytes and heads of this width.

    Registers are limited for `plain` attention only, because a contrast and a residual need more of them.
    """
    tile = tiles[qkv.element_size(), width]
    return tile if plain else tile._replace(registers=None)


def heads_at_a_time(heads: int, bytes_of_head: int) -> int:
    """How many heads are worked on together, see `place`."""
    return max(1, min(heads, CACHE_BYTES // bytes_of_head))


@triton.jit
def place(tiles, heads, at_a_time):
    """Tile and head of this program. Heads go in groups; in a group, all first tiles run, then all second ones, …

    If the first tiles have the longest rows, the short ones fill the gaps at the end.
    """
    program = tl.program_id(0)
    before = program // (tiles * at_a_time) * at_a_time
    together = tl.minimum(at_a_time, heads - before)  # fewer in the last group
    rest = program - before * tiles
    return rest // together, before + rest % together


@triton.jit
def shared_heads(group, heads, GROUP: tl.constexpr):
    """The places of a query head's key and value in a row of qkv, counted in heads."""
    return heads + group, heads + heads // GROUP + group


@triton.jit
def rows_of(base, stride, start, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the rows of a head from `start` on."""
    columns = tl.arange(0, WIDTH)[None, :]
    # The offsets within a tile do not change in a loop, and tiles of one shape share them.
    return base + tl.cast(start, tl.int64) * stride + (tl.arange(0, SIZE)[:, None] * stride + columns)


@triton.jit
def take(base, stride, start, tokens, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """The rows from `start` on; those beyond the last token are zero."""
    rows = rows_of(base, stride, start, SIZE, WIDTH)
    if CUT:
        inside = tl.arange(0, SIZE) + start < tokens
        return tl.load(rows, mask=inside[:, None], other=0.0)
    else:
        return tl.load(rows)


@triton.jit
def take_values(
    values, row, before, first_row, residual, start, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """The values that are averaged: where MIXED, v + ρ (v⁰ − v)."""
    v = take(values, row, start, tokens, SIZE, WIDTH, CUT)
    if MIXED:
        v = mixed(v, take(before, first_row, start, tokens, SIZE, WIDTH, CUT), residual)
    return v


@triton.jit
def put(base, stride, start, tokens, tile, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """Write the rows from `start` on, in the precision of where they go."""
    rows, tile = rows_of(base, stride, start, SIZE, WIDTH), tile.to(base.dtype.element_ty)
    if CUT:
        inside = tl.arange(0, SIZE) + start < tokens
        tl.store(rows, tile, mask=inside[:, None])
    else:
        tl.store(rows, tile)


@triton.jit
def take_facts(facts, start, tokens, beyond, SIZE: tl.constexpr, CUT: tl.constexpr):
    """One number for each row."""
    rows = tl.arange(0, SIZE) + start
    if CUT:
        return tl.load(facts + rows, mask=rows < tokens, other=beyond)
    else:
        return tl.load(facts + rows)


@triton.jit
def put_facts(facts, start, tokens, values, SIZE: tl.constexpr, CUT: tl.constexpr):
    """One number for each row."""
    rows = tl.arange(0, SIZE) + start
    if CUT:
        tl.store(facts + rows, values, mask=rows < tokens)
    else:
        tl.store(facts + rows, values)


@triton.jit
def hide(tile, rows, keys, hidden, tokens, CAUSAL: tl.constexpr):
    """Hide later keys in a tile of logits or, without causality, keys beyond the last token.

    An existing causal row sees no key beyond the last token, and other rows are not written.
    """
    if CAUSAL:
        return tl.where(keys <= rows, tile, hidden)
    else:
        return tl.where(keys < tokens, tile, hidden)


@triton.jit
def keys_in_part(start, tokens, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Begin and end of the keys that a tile of queries from `start` on sees in part. It sees all earlier keys."""
    if CAUSAL:
        return start, tl.minimum(start + QUERIES, tokens)
    else:
        return tokens // KEYS * KEYS, tokens
