"""What the kernels of `packed` share: cutting tokens into tiles, and reading, writing and masking tiles.

Tokens are cut into blocks of 64 and a smaller last tile (65 = 64 + 16, not 128), because short sequences would waste
most of a large tile. `FULL` counts whole blocks, `TAIL` is the size of the last tile (0: none); a tile that is `CUT`
may reach beyond the last token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acutance.attention.kernels.sizes import power_of_two

BLOCK_TOKENS = 64
BLOCK = tl.constexpr(BLOCK_TOKENS)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load(base, stride, start, tokens, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """Rows of one head; beyond the last token, where only a CUT tile reaches, they are zero."""
    rows, columns = tl.arange(0, SIZE) + start, tl.arange(0, WIDTH)
    place = base + rows[:, None] * stride + columns[None, :]
    if CUT:
        return tl.load(place, mask=rows[:, None] < tokens, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def store(base, stride, start, tokens, tile, SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """Rows of one head, in the precision of where they go."""
    rows, columns = tl.arange(0, SIZE) + start, tl.arange(0, WIDTH)
    place = base + rows[:, None] * stride + columns[None, :]
    if CUT:
        tl.store(place, tile.to(base.dtype.element_ty), mask=rows[:, None] < tokens)
    else:
        tl.store(place, tile.to(base.dtype.element_ty))


@triton.jit
def strength_of(strength, head, constant, LEARNT: tl.constexpr):
    """A head's number such as λ, learnt or one constant for all."""
    if LEARNT:
        return tl.load(strength + head).to(tl.float32)
    else:
        return constant


@triton.jit
def seen(tile, rows, keys, hidden, tokens, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """Hide in a tile of logits the keys beyond the last token and, if causal, later ones."""
    if CAUSAL:
        tile = tl.where(keys <= rows, tile, hidden)
    if CUT:
        tile = tl.where(keys < tokens, tile, hidden)
    return tile


@triton.jit
def keys_of(own, head, step, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """The pointer to the keys that a query head shares with its GROUP, from the pointer to its queries."""
    if GROUP == 1:
        return own + step
    else:
        return own + step - (head - head // GROUP) * WIDTH


@triton.jit
def mixed(v, first, residual):
    """v + ρ (v⁰ − v), in the precision of v."""
    return (v.to(tl.float32) + residual * (first.to(tl.float32) - v.to(tl.float32))).to(v.dtype)


@triton.jit
def mean_of_earlier(own, before, start, PRECISION: tl.constexpr):
    """For each row from `start` on, the mean of it and all earlier rows. `before` is the sum of rows before `start`."""
    rows = tl.arange(0, own.shape[0])
    earlier = (rows[None, :] <= rows[:, None]).to(own.dtype)
    return (tl.dot(earlier, own, input_precision=PRECISION) + before[None, :]) / (rows + start + 1)[:, None]


@triton.jit
def load_values(
    values, row, before, first_row, residual, start, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """The values that are averaged: where MIXED, v + ρ (v⁰ − v)."""
    v = load(values, row, start, tokens, SIZE, WIDTH, CUT)
    if MIXED:
        v = mixed(v, load(before, first_row, start, tokens, SIZE, WIDTH, CUT), residual)
    return v


@triton.jit
def visible_mean(
    values, row, before, first_row, residual, start, tokens,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    TAIL: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U v of one tile of queries: the mean of the values each sees; one row where all see the same."""
    total = tl.zeros((WIDTH,), tl.float32)
    for key in range(0, start if CAUSAL else FULL * BLOCK, BLOCK):
        v = load_values(values, row, before, first_row, residual, key, tokens, BLOCK, WIDTH, False, MIXED)
        total += tl.sum(v.to(tl.float32), 0)
    if CAUSAL:
        own = load_values(values, row, before, first_row, residual, start, tokens, SIZE, WIDTH, CUT, MIXED)
        return mean_of_earlier(own, total, start, PRECISION)
    else:
        if TAIL > 0:
            last = load_values(values, row, before, first_row, residual, FULL * BLOCK, tokens, TAIL, WIDTH, True, MIXED)
            total += tl.sum(last.to(tl.float32), 0)
        return (total / tokens)[None, :]


@triton.jit
def even_weights(weights, rows, keys, tokens, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """U in the tile's shape: each query gives the same weight to all it sees."""
    even = seen(tl.full(weights.shape, 1.0, tl.float32), rows, keys, 0.0, tokens, CAUSAL, CUT)
    if CAUSAL:
        return even / (rows + 1)
    else:
        return even / tokens


@triton.jit
def visible(start, CAUSAL: tl.constexpr, FULL: tl.constexpr):
    """The end of the whole blocks of keys that a tile of queries from `start` on may see."""
    if CAUSAL:
        return tl.minimum(start + BLOCK, FULL * BLOCK)
    else:
        return FULL * BLOCK


def cut(tokens: int) -> tuple[int, int]:
    """The number of whole blocks, and the smallest tensor-core tile that holds the rest."""
    full, rest = divmod(tokens, BLOCK_TOKENS)
    return full, max(16, power_of_two(rest)) if rest else 0


def features(contrast: Tensor | None, residual: Tensor | None, heads: int, kv_heads: int) -> dict[str, object]:
    """What a kernel of `packed` is compiled for, beside its `kind`."""
    return {"CONTRAST": contrast is not None, "MIXED": residual is not None, "GROUP": heads // kv_heads}


def over_tiles(parts: Tensor) -> Tensor:
    """The sum over tiles of (…, tiles)."""
    return parts.sum(-1) if parts.shape[-1] > 1 else parts[..., 0]  # no kernel for a sum of one


def stand_ins(qkv: Tensor, first: Tensor | None, strength: Tensor | None) -> tuple[Tensor, Tensor]:
    """v⁰ and λ. Any tensor stands in for what is absent and not read."""
    return qkv if first is None else first, qkv if strength is None else strength


def strides(qkv: Tensor, first: Tensor | None) -> tuple[int, int, int, int]:
    """The strides of qkv and of v⁰ from sample to sample and from token to token."""
    first = qkv if first is None else first
    return qkv.stride(0), qkv.stride(1), first.stride(0), first.stride(1)


def kind(
    qkv: Tensor, first: Tensor | None, strength: Tensor | None, width: int, causal: bool, constant: float = 1.0
) -> dict[str, object]:
    """What a kernel is compiled for, beside the sizes."""
    return {
        "CORRECTED": first is not None and (strength is not None or constant != 0),
        "CAUSAL": causal,
        "LEARNT": strength is not None,
        "WIDTH": width,
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }
