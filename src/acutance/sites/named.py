"""Sites whose weights are found by the usual names, and whose norms and gains are found by running the block once."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.mitigations.projection import Projection, Projections
from acutance.sites.discovery import Surroundings, changes_output, discover, is_norm
from acutance.sites.patched import PatchedSite
from acutance.sites.site import TOKENS_REMAIN
from acutance.sites.structure import outwards, path_of

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


class Sizes(NamedTuple):
    """Heads and channels of one attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dim: int


class NamedSite(PatchedSite):
    """One attention. Its weights are looked up when asked for: reading tokens needs none of them."""

    @cached_property
    def _found(self) -> tuple[Projections, Sizes]:
        return by_names(self.name, self.block, self.attention)

    heads: Any = property(lambda self: self._found[1].heads)
    kv_heads: Any = property(lambda self: self._found[1].kv_heads)
    head_dim: Any = property(lambda self: self._found[1].head_dim)
    dim: Any = property(lambda self: self._found[1].dim)

    def projections(self) -> Projections:
        """By their names."""
        return self._found[0]

    def output_projection(self) -> nn.Module | None:
        """W_proj, which BERT and others keep beside the attention; None under an unknown name."""
        return output_of(self.block, self.attention)

    @cached_property
    def surroundings(self) -> Surroundings:
        """What the block does around its attention."""
        output = self.projections().output
        inside = self.attention is not self.block and output.module in set(self.attention.modules())
        width = self.dim if inside else output.shape()[1]
        return discover(self.block, self.attention, None if inside else output.module, self.dim, width)

    def pre_norm(self) -> nn.Module | None:
        """The norm before the attention; None in Post-LN models such as BERT."""
        source = self.surroundings.source
        if source is None and any(map(is_norm, self.block.modules())):
            raise self._unknown("which of its norms comes before the attention")
        return None if source is self.block else source

    def pre_norm_gain(self) -> Tensor | None:
        """The norm's weight; Gemma's norms, and some others, multiply by 1 + weight."""
        gain, norm = super().pre_norm_gain(), self.pre_norm()
        return gain if gain is None or norm is None or not _adds_one(norm) else 1 + gain

    def between(self) -> str | None:
        """A norm or a gate between the attention and W_proj, as in BitNet and Qwen3-Next."""
        changes = self._changes_output
        if changes is None:  # the attention does not run on random tokens
            changes = any(map(is_norm, self.attention.modules()))
        return f"a norm or a gate of {type(self.attention).__name__} before W_proj" if changes else None

    @cached_property
    def _changes_output(self) -> bool | None:
        """Asked of the first layer whose attention is of the same class; None where it is not known."""
        first = next(site for site in self.stack.sites if type(site.attention) is type(self.attention))
        if isinstance(first, NamedSite) and first is not self:
            return first._changes_output
        return changes_output(self.stack.root, self.block, self.attention, self.projections().output.module, self.dim)

    def post_norm(self) -> nn.Module | None:
        """The norm of the attention branch, as in Gemma 2 and 3, OLMo 2 and GLM-4."""
        return self._followed().post_norm

    def branch_gain(self) -> Tensor | None:
        """LayerScale's gain, or Granite's number for all channels."""
        gain = self._followed().gain
        if gain is None or isinstance(gain, Tensor):
            return gain
        return torch.full((self.dim,), float(gain)).to(self.projection_weight())

    def _followed(self) -> Surroundings:
        if not self.surroundings.is_complete:
            raise self._unknown("what it does to the attention's output")
        return self.surroundings

    def _unknown(self, what: str) -> AcutanceError:
        return AcutanceError(
            f"{self.name}: {type(self.block).__name__} does not run on random tokens, so {what} is not known: describe "
            "the model in a Library of its own"
        )


def by_names(name: str, block: nn.Module, attention: nn.Module) -> tuple[Projections, Sizes]:
    """Look the usual names up; what is missing is an error that says so."""
    output, heads = output_of(block, attention), _heads_of(attention)
    query, key, value = (_whole(_child(attention, names)) for names in SEPARATE.values())
    together = (*JOINT, *JOINT_BY_HEAD, *KEYS_AND_VALUES)
    joint = next((path for path in together if _child(attention, (path,)) is not None), None)
    if output is None or (value is None and joint is None):
        missing = "W_proj" if output is None else "W_V"
        raise NoSitesError(
            f"{name} ({type(attention).__name__}) keeps {missing} under a name that is not known here, or has none. "
            f"{TOKENS_REMAIN}"
        )
    if heads is None:
        raise NoSitesError(f"{name} ({type(attention).__name__}) does not say how many heads it has. {TOKENS_REMAIN}")
    dim, width = Projection(output).shape()
    head_dim = width // heads
    if value is not None:
        kv_heads = value.shape()[0] // head_dim
        return Projections(query, key, value, Projection(output)), Sizes(heads, kv_heads, head_dim, dim)
    assert joint is not None
    module, query_heads = attention.get_submodule(joint), 0 if joint in KEYS_AND_VALUES else heads
    kv_heads = (Projection(module).shape()[0] // head_dim - query_heads) // 2
    ends = accumulate((query_heads, kv_heads, kv_heads), initial=0)
    rows: list[slice | Tensor] = [slice(start * head_dim, end * head_dim) for start, end in pairwise(ends)]
    if joint in JOINT_BY_HEAD or getattr(attention, "multi_query", None) is False:  # GPT-BigCode has them either way
        rows = list(torch.arange(heads * 3 * head_dim).reshape(heads, 3, head_dim).transpose(0, 1).flatten(1))
    q, k, v = (Projection(module, each) for each in rows)
    found = Projections(q if query_heads else query, k, v, Projection(output))
    return found, Sizes(heads, kv_heads, head_dim, dim)


def output_of(block: nn.Module, attention: nn.Module) -> nn.Module | None:
    """The module of W_proj, in the attention or in what is around it."""
    found = _child(attention, OUTPUT)
    for path in [] if block is attention else list(outwards(path_of(block, attention)))[1:-1]:
        found = found or _child(block.get_submodule(path), OUTPUT_BESIDE)
    return found


def _heads_of(attention: nn.Module) -> int | None:
    """How many heads the queries have, as the module or its configuration says."""
    config = getattr(attention, "config", None)
    said = (*(getattr(attention, key, None) for key in HEADS), getattr(config, "num_attention_heads", None))
    return next((heads for heads in said if isinstance(heads, int)), None)


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


def _adds_one(norm: nn.Module) -> bool:
    """Whether the norm multiplies by 1 + weight, tried on tokens that are normalised already."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    token = 1 - 2 * (torch.arange(weight.shape[-1], device=weight.device) % 2).to(weight.dtype)
    with torch.no_grad():
        gain = token * (norm.forward(token) - norm.forward(-token)) / 2  # without its bias
        return bool((gain - weight).abs().sum() > (gain - 1 - weight).abs().sum())
