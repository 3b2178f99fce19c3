"""Where transformers' models keep W_Q, W_K, W_V, W_proj, the norm before the attention and LayerScale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acutance.errors import NoSitesError
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.blocks import path_of
from acutance.sites.huggingface_norms import norm_before
from acutance.sites.linear import matrix_of, shape_of

SEPARATE = {
    "query": ("q_proj", "query", "q_lin", "q"),
    "key": ("k_proj", "key", "k_lin", "k"),
    "value": ("v_proj", "value", "v_lin", "v"),
}
# One projection for all three: its rows stand query by key by value, or so head by head.
JOINT: dict[str, Literal["blocks", "heads"]] = {
    "c_attn": "blocks",
    "qkv_proj": "blocks",
    "Wqkv": "blocks",
    "qkv": "blocks",
    "query_key_value": "heads",
}
PROJECTION = ("o_proj", "out_proj", "out_lin", "o", "c_proj", "Wo", "dense", "proj", "projection")
PROJECTION_BESIDE = ("output.dense", "output", "dense")  # in the module around the attention, as BERT has it
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
LAYER_SCALES = ("layer_scale1.lambda1", "layer_scale1.gamma", "lambda_1")


@dataclass(frozen=True)
class Weights:
    """Where one attention's weights are; read at every call, because training replaces what is stored."""

    attention: nn.Module
    block: nn.Module
    projection: nn.Module
    pre_norm: nn.Module | None
    heads: int
    kv_heads: int
    head_dim: int
    dim: int

    def projection_weight(self) -> Tensor:
        """W_proj as (dim, heads · head_dim)."""
        return matrix_of(self.projection)

    def projection_bias(self) -> Tensor | None:
        """What is added after W_proj."""
        return _bias(self.projection)

    def query(self) -> Tensor:
        """W_Q as (heads · head_dim, dim)."""
        return self._rows("query", matrix_of)

    def key(self) -> Tensor:
        """W_K as (kv_heads · head_dim, dim)."""
        return self._rows("key", matrix_of)

    def value(self) -> Tensor:
        """W_V as (kv_heads · head_dim, dim)."""
        return self._rows("value", matrix_of)

    def value_bias(self) -> Tensor | None:
        """What is added to the values."""
        joint = _joint(self.attention)
        module = self.attention.get_submodule(joint) if joint else _child(self.attention, SEPARATE["value"])
        return None if module is None or _bias(module) is None else self._rows("value", _bias)

    def branch_gain(self) -> Tensor | None:
        """LayerScale's gain, wherever the block keeps it, or Granite's number for all channels."""
        multiplier = getattr(self.block, "residual_multiplier", 1.0)
        if multiplier != 1.0:
            return torch.full((self.dim,), multiplier).to(next(self.projection.parameters()))
        for path in LAYER_SCALES:
            value: object = self.block
            for name in path.split("."):
                value = getattr(value, name, None)
            if isinstance(value, Tensor):
                return value
        return None

    def _rows(self, which: Literal["query", "key", "value"], read: Callable[[nn.Module], Any]) -> Tensor:
        separate = _child(self.attention, SEPARATE[which])
        if separate is not None:
            found: Tensor = read(separate)
            return found
        joint = _joint(self.attention)
        assert joint is not None, "find_weights has looked"
        rows: Tensor = read(self.attention.get_submodule(joint))
        position = ("query", "key", "value").index(which)
        if JOINT[joint] == "heads" or getattr(self.attention, "multi_query", None) is False:  # GPT-BigCode has both
            return rows.reshape(self.heads, 3, self.head_dim, *rows.shape[1:])[:, position].flatten(0, 1)
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        return torch.split(rows, sizes)[position]


def find_weights(name: str, block: nn.Module, attention: nn.Module) -> Weights:
    """Look the usual names up; what is missing is an error that says so."""
    path = path_of(block, attention)
    parents = [block.get_submodule(path[: -len(p)].rstrip(".")) for p in _tails(path)]
    projection = _child(attention, PROJECTION)
    for parent in parents:
        projection = projection if projection is not None else _child(parent, PROJECTION_BESIDE)
    joint, value = _joint(attention), _child(attention, SEPARATE["value"])
    if projection is None or (joint is None and value is None):
        missing = "W_proj" if projection is None else "W_V"
        raise NoSitesError(
            f"{name} ({type(attention).__name__}) keeps {missing} under a name that is not known here, or has none. "
            f"{TOKENS_REMAIN}"
        )
    heads = next((int(getattr(attention, key)) for key in HEADS if hasattr(attention, key)), None)
    if heads is None:
        config: Any = attention.config
        heads = int(config.num_attention_heads)
    dim, width = shape_of(projection)
    head_dim = width // heads
    if value is not None:
        kv_heads = shape_of(value)[0] // head_dim
    else:
        assert joint is not None
        kv_heads = (shape_of(attention.get_submodule(joint))[0] // head_dim - heads) // 2
    return Weights(attention, block, projection, norm_before(block, path), heads, kv_heads, head_dim, dim)


def _tails(path: str) -> list[str]:
    """The ends of a path, shortest first: what to cut off to go to its parents."""
    parts = path.split(".")
    return [".".join(parts[-n:]) for n in range(1, len(parts))]


def _child(module: nn.Module, paths: tuple[str, ...]) -> nn.Module | None:
    for path in paths:
        try:
            found = module.get_submodule(path)
        except AttributeError:
            continue
        if path != "output" or isinstance(getattr(found, "weight", None), Tensor):  # elsewhere what holds output.dense
            return found
    return None


def _joint(attention: nn.Module) -> str | None:
    return next((name for name in JOINT if isinstance(getattr(attention, name, None), nn.Module)), None)


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, Tensor) else None
