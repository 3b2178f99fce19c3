"""Where an attention keeps its weights: rows of a Linear, a Conv1D, an adapter, a packed or interleaved weight."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.mitigations.made import made_of, put_on, take_off
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.linear import is_conv1d, is_plain, matrix_of, shape_of
from acutance.sites.structure import path_of

SEPARATE = {
    "query": ("q_proj", "query", "query_proj", "q_lin", "q", "to_q", "wq", "q_linear", "W_q", "Wq"),
    "key": ("k_proj", "key", "key_proj", "k_lin", "k", "to_k", "wk", "k_linear", "W_k", "Wk"),
    "value": ("v_proj", "value", "value_proj", "v_lin", "v", "to_v", "wv", "v_linear", "W_v", "Wv"),
}
# One projection for all three, or for keys and values: its rows stand query by key by value, or so head by head.
JOINT = ("c_attn", "qkv_proj", "Wqkv", "qkv", "to_qkv", "in_proj")
JOINT_BY_HEAD = ("query_key_value",)
KEYS_AND_VALUES = ("kv", "to_kv")
OUTPUT = (
    *("o_proj", "out_proj", "out_lin", "o", "c_proj", "Wo", "dense", "proj", "projection"),
    *("to_out.0", "to_out", "wo", "W_o", "out", "output_proj", "out_linear"),
)
OUTPUT_BESIDE = ("output.dense", "output", "dense")  # in the module around the attention, as BERT has it
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads")


@dataclass(frozen=True)
class Projection:
    """Some rows of a module's weight; read at every call, because training replaces what is stored."""

    module: nn.Module
    rows: slice | Tensor | None = None  # None: all
    weight: str = "weight"
    bias: str = "bias"
    bias_rows: slice | Tensor | None = None  # where they are not those of the weight
    bias_module: nn.Module | None = None  # where the bias is kept beside the weight's module

    def matrix(self) -> Tensor:
        """What tokens are multiplied by, (rows, in)."""
        whole = matrix_of(self.module) if self.weight == "weight" else getattr(self.module, self.weight)
        return whole if self.rows is None else whole[self.rows]

    def offset(self) -> Tensor | None:
        """What is added, (rows,); None where nothing is."""
        found = getattr(self.bias_module or self.module, self.bias, None)
        rows = self.rows if self.bias_rows is None else self.bias_rows
        return None if not isinstance(found, Tensor) else found if rows is None else found[rows]

    def refuse_parametrisation(self) -> None:
        """Where the weight is no parameter of its own, or more is done to tokens than multiply them by it."""
        kind = type(self.module).__name__
        if made_of(self.module, self.weight) is not None:
            raise AcutanceError("another mitigation makes W_V and W_proj already: choose one of the two")
        if not isinstance(self.module, nn.MultiheadAttention) and not is_plain(self.module):
            raise AcutanceError(
                f"a projection of the attention is a {kind}, which does more than multiply by its weight, so nothing "
                "else can make that weight: merge an adapter into the layer first (with peft, merge_and_unload())"
            )
        if not isinstance(self.module._parameters.get(self.weight), nn.Parameter):
            raise AcutanceError(
                f"{self.weight} of a {kind} is no parameter but made by something else, such as a parametrization or "
                "weight norm: take that off first"
            )

    def parametrise(self, owner: nn.Module, make: Callable[[], Tensor]) -> None:
        """Let `make`, from the owner's parameters, give these rows from now on; the module's others stay parameters."""
        put_on(self.module, self.weight, self.rows, int(is_conv1d(self.module)), owner, make)

    def unparametrise(self, *, keep: bool) -> None:
        """Make them a parameter again: with what is made now if `keep`, else with what was there before."""
        take_off(self.module, self.weight, keep=keep)


class Projections(NamedTuple):
    """The four of one attention; None where one is not known."""

    query: Projection | None
    key: Projection | None
    value: Projection
    output: Projection


class Sizes(NamedTuple):
    """Heads and channels of one attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dim: int


def by_names(name: str, block: nn.Module, attention: nn.Module) -> tuple[Projections, Sizes]:
    """Look the usual names up; what is missing is an error that says so."""
    output = output_of(block, attention)
    joint = next((path for path in (*JOINT, *JOINT_BY_HEAD) if _child(attention, (path,)) is not None), None)
    both = next((path for path in KEYS_AND_VALUES if _child(attention, (path,)) is not None), None)
    value = _child(attention, SEPARATE["value"])
    if output is None or (joint is None and both is None and value is None):
        missing = "W_proj" if output is None else "W_V"
        raise NoSitesError(
            f"{name} ({type(attention).__name__}) keeps {missing} under a name that is not known here, or has none. "
            f"{TOKENS_REMAIN}"
        )
    heads = heads_of(attention)
    if heads is None:
        raise NoSitesError(f"{name} ({type(attention).__name__}) does not say how many heads it has. {TOKENS_REMAIN}")
    dim, width = shape_of(output)
    head_dim = width // heads
    last = Projection(output)
    if value is not None:
        kv_heads = shape_of(value)[0] // head_dim
        query, key = (_whole(_child(attention, SEPARATE[which])) for which in ("query", "key"))
        return Projections(query, key, Projection(value), last), Sizes(heads, kv_heads, head_dim, dim)
    if both is not None and joint is None:
        module = attention.get_submodule(both)
        half = shape_of(module)[0] // 2
        query = _whole(_child(attention, SEPARATE["query"]))
        key, values = Projection(module, slice(0, half)), Projection(module, slice(half, None))
        return Projections(query, key, values, last), Sizes(heads, half // head_dim, head_dim, dim)
    assert joint is not None
    module = attention.get_submodule(joint)
    kv_heads = (shape_of(module)[0] // head_dim - heads) // 2
    # GPT-BigCode has its rows either way.
    by_head = joint in JOINT_BY_HEAD or getattr(attention, "multi_query", None) is False
    q_rows, k_rows, v_rows = _joint_rows(heads, kv_heads, head_dim, by_head=by_head)
    sizes = Sizes(heads, kv_heads, head_dim, dim)
    q, k, v = (Projection(module, rows) for rows in (q_rows, k_rows, v_rows))
    return Projections(q, k, v, last), sizes


def output_of(block: nn.Module, attention: nn.Module) -> nn.Module | None:
    """The module of W_proj, in the attention or in what is around it."""
    found = _child(attention, OUTPUT)
    parts = [] if block is attention else path_of(block, attention).split(".")
    for depth in range(len(parts) - 1, 0, -1):
        found = found or _child(block.get_submodule(".".join(parts[:depth])), OUTPUT_BESIDE)
    return found


def heads_of(attention: nn.Module) -> int | None:
    """How many heads the queries have, as the module or its configuration says."""
    found = next((getattr(attention, key) for key in HEADS if isinstance(getattr(attention, key, None), int)), None)
    if found is None:
        found = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    return found if isinstance(found, int) else None


@cache
def changes_output(cls: Any) -> bool:
    """Whether the class normalises or gates what came out of its attention, as BitNet and Qwen3-Next do."""
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return False
    return re.search(r"self\.\w*norm\w*\(\s*attn_output|attn_output\s*\*(?!\*)", source) is not None


def _joint_rows(heads: int, kv_heads: int, head_dim: int, *, by_head: bool) -> tuple[slice | Tensor, ...]:
    if by_head:
        rows = torch.arange(heads * 3 * head_dim).reshape(heads, 3, head_dim)
        return tuple(rows[:, place].flatten() for place in range(3))
    ends = [heads * head_dim, (heads + kv_heads) * head_dim, (heads + 2 * kv_heads) * head_dim]
    return tuple(slice(start, end) for start, end in zip([0, *ends], ends, strict=False))


def _whole(module: nn.Module | None) -> Projection | None:
    return None if module is None else Projection(module)


def _child(module: nn.Module, paths: tuple[str, ...]) -> nn.Module | None:
    for path in paths:
        try:
            found = module.get_submodule(path)
        except AttributeError:
            continue
        if path not in ("output", "to_out") or isinstance(getattr(found, "weight", None), Tensor):
            return found  # elsewhere what holds output.dense
    return None
