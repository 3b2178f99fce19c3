"""Where an attention keeps its weights: rows of a Linear, a Conv1D, an adapter, a packed or interleaved weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.mitigations import made
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.structure import evaluating, path_of

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
class Projection(made.Projection):
    """Rows of any library's weight, also those of a Conv1D or an adapter."""

    def matrix(self) -> Tensor:
        """The matrix that tokens are multiplied by, (rows, in)."""
        whole = matrix_of(self.module) if self.weight == "weight" else getattr(self.module, self.weight)
        return whole if self.rows is None else whole[self.rows]

    def refuse_parametrisation(self) -> None:
        """Raise too where the module does more to tokens than multiply them by its weight."""
        is_made = made.made_of(self.module, self.weight) is not None
        if not is_made and not isinstance(self.module, nn.MultiheadAttention) and not is_plain(self.module):
            raise AcutanceError(
                f"a projection of the attention is a {type(self.module).__name__}, which does more than multiply by "
                "its weight, so nothing else can make that weight: merge an adapter into the layer first (with peft, "
                "merge_and_unload())"
            )
        super().refuse_parametrisation()

    def parametrise(self, owner: nn.Module, make: Callable[[], Tensor]) -> None:
        """Compute these rows by `make`, from the owner's parameters; the module's other rows stay parameters."""
        made.put_on(self.module, self.weight, self.rows, int(is_conv1d(self.module)), owner, make)


class Projections(NamedTuple):
    """The four of one attention; None where one is not known."""

    query: made.Projection | None
    key: made.Projection | None
    value: made.Projection
    output: made.Projection


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


def is_plain(module: nn.Module) -> bool:
    """Whether it multiplies by its `weight` and does nothing else but add a bias; what wraps a layer does more."""
    own = "forward" in vars(module)  # some replace the method of the layer itself
    return not own and (type(module).forward is nn.Linear.forward or is_conv1d(module))


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix (out, in) that tokens are multiplied by.

    Of an adapter around a layer (LoRA and its kin, whose `weight` is often that of the layer alone) it is what comes
    out for the unit vectors, less what comes out for zero, in evaluation mode.
    """
    if is_plain(module):
        return _stored(module)
    zero = _zero_for(module)
    random = torch.randn(4, zero.shape[1], generator=torch.Generator().manual_seed(0)).to(zero)
    units = torch.eye(zero.shape[1]).to(zero)
    with evaluating(module):
        offset, rows = _through(module, zero), _through(module, units)
        expected = random @ (rows - offset) + offset
        off = torch.linalg.vector_norm(_through(module, random) - expected)
    if not off <= torch.finfo(random.dtype).eps ** 0.5 * torch.linalg.vector_norm(expected):
        raise _refusal(module, "what it does to tokens is not linear")
    return (rows - offset).T


def shape_of(module: nn.Module) -> tuple[int, int]:
    """The shape (out, in) of that matrix, which is not made for it."""
    if is_plain(module):
        rows, columns = _stored(module).shape
        return rows, columns
    zero = _zero_for(module)
    with evaluating(module):
        return _through(module, zero).shape[1], zero.shape[1]


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layers store their weight the other way round; asked without importing transformers."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _stored(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if is_conv1d(layer) else weight


def _zero_for(module: nn.Module) -> Tensor:
    """A token of zeros: the layer that is wrapped, or the adapter's first, takes what the whole takes."""
    layer = next((inside for inside in module.modules() if isinstance(inside, nn.Linear) or is_conv1d(inside)), None)
    if layer is None:
        raise _refusal(module, "no linear layer is inside it")
    return _stored(layer).detach().new_zeros(1, _stored(layer).shape[1])


def _through(module: nn.Module, x: Tensor) -> Tensor:
    """By its forward alone: hooks, such as our own, may change what comes out."""
    try:
        y = module.forward(x)
    except Exception as error:  # whatever somebody's module raises for what it does not take
        raise _refusal(module, f"it does not take tokens of shape {tuple(x.shape)} ({error})") from error
    if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
        raise _refusal(module, "it does not give one vector a token")
    return y


def _refusal(module: nn.Module, reason: str) -> NoSitesError:
    return NoSitesError(
        f"a projection of the attention is a {type(module).__name__}, and {reason}, so it has no matrix to read: merge "
        f"an adapter into the layer it is around (with peft, merge_and_unload()). {TOKENS_REMAIN}"
    )
