"""Attention, MLP and the block around them, shared by all reference models; parameters have timm's names.

The first layer's values travel in plain sight: every block is called `x, v0 = block(x, v0)`. Nothing is kept on the
side, so checkpointing, compiling and sharding see all there is.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.attention import AttentionCall, attend, finish
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError
from acutance.mitigations import Mitigation
from acutance.mitigations.eigen import Weights, weights_together
from acutance.mitigations.projection import Projection, Projections, weight_with
from acutance.models.kernels import mlp

AttentionKind = Literal["softmax", "symmetric", "rbf", "linear", "polynomial"]
NormPlace = Literal["pre", "post"]


class ModelConfig:
    """The base of the models' configurations, which are frozen dataclasses. Blocks are built from them.

    What is an option of some models only is a plain attribute of the others.
    """

    dim: int
    heads: int
    dropout: float
    attention: Any = "softmax"
    causal: Any = False
    norm: Any = "pre"
    norm_eps: Any = 1e-6
    activation: Any = nn.GELU
    qkv_bias: Any = True
    proj_bias: Any = True
    layer_scale: Any = None
    hidden: Any = property(lambda self: int(self.dim * self.mlp_ratio))  # channels inside the MLP
    attention_dropout: Any = property(lambda self: self.dropout)

    def __post_init__(self) -> None:
        """Refuse counts below 1, unknown words, heads that do not divide dim, patches that do not tile the image."""
        own: Any = self
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(own, name)
            if kind is int and value < (least := 0 if name == "registers" else 1):
                raise AcutanceError(f"{name} must be at least {least}, not {value}")
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise AcutanceError(f"unknown {name} {value!r}; known: {', '.join(get_args(kind))}")
            if name.endswith("heads") and own.dim % value:
                raise AcutanceError(f"dim {own.dim} cannot be shared out among {value} heads: choose a multiple")
            if isinstance(value, list):  # from JSON
                object.__setattr__(self, name, tuple(value))
        if hasattr(self, "patch_size") and own.image_size % own.patch_size:
            raise AcutanceError(f"image_size {own.image_size} is no multiple of patch_size {own.patch_size}")
        layers = getattr(self, "mitigation_layers", None) or ()
        if unknown := [layer for layer in layers if not 1 <= layer <= own.depth]:
            raise AcutanceError(f"mitigation_layers {unknown}: the layers are numbered 1 to {own.depth}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]


class Attention(nn.Module):
    """Multi-head self-attention with a place for a mitigation and an observer."""

    def __init__(self, config: ModelConfig, layer: int = 1) -> None:
        super().__init__()
        self.layer = layer  # depth; 1 is the first
        self.heads, self.head_dim = config.heads, config.dim // config.heads
        self.kernel, self.causal, self.attention_dropout = config.attention, config.causal, config.attention_dropout
        self.joint, count = ("kv", 2) if self.kernel == "symmetric" else ("qkv", 3)
        setattr(self, self.joint, nn.Linear(config.dim, count * config.dim, bias=config.qkv_bias))
        self.proj = nn.Linear(config.dim, config.dim, bias=config.proj_bias)
        self.proj_drop = nn.Dropout(config.dropout)
        self.mitigation = Mitigation()
        self.observer: Callable[[AttentionCall], None] | None = None

    def projections(self) -> Projections:
        """W_Q, W_K, W_V and W_proj. In symmetric attention W_Q is W_K."""
        dim = self.heads * self.head_dim
        starts = (0, 0, dim) if self.kernel == "symmetric" else (0, dim, 2 * dim)
        q, k, v = (Projection(getattr(self, self.joint), slice(start, start + dim)) for start in starts)
        return Projections(q, k, v, Projection(self.proj))

    def forward(
        self,
        x: Tensor,
        v0: Tensor | None,
        weights: Weights | None = None,
        residual: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Any, AttentionCall | None]:
        """The branch's output, the first layer's values, what the mitigation keeps, and the call for its `stream`.

        In the first layer v0 is None. `weights` are W_V and W_proj, if a mitigation made them for all layers at once;
        an argument, so that checkpointing does not make them again. `residual` is what the branch is added to,
        `previous` what the layer before kept.
        """
        weights = weights_together([self.mitigation])[0] if weights is None else weights
        joint = getattr(self, self.joint)
        packed = joint(x) if weights is None else F.linear(x, weight_with(joint, weights[0]), joint.bias)
        by_head = packed.reshape(*packed.shape[:2], -1, self.heads, self.head_dim)
        parts = by_head.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        q, k, v = parts[0], parts[-2], parts[-1]  # symmetric: the one projection is both q and k
        dropout = self.attention_dropout if self.training else 0.0
        options: dict[str, Any] = {"causal": self.causal, "kernel": self.kernel}

        def own(values: Tensor, new_q: Tensor | None = None, new_k: Tensor | None = None, bias: Any = None) -> Tensor:
            queries, keys = q if new_q is None else new_q, k if new_k is None else new_k
            return AttentionOperator(queries, keys, mask=bias, **options).apply(values, dropout)

        tensors: dict[str, Any] = {
            "x": x,
            "residual": residual,
            "q": q,
            "k": k,
            "v": v,
            "first": v0,
            "previous": previous,
        }
        call = AttentionCall(layer=self.layer, **tensors, product=own, packed=packed, dropout=dropout, **options)
        u, values = attend(call, self.mitigation, self.observer)
        merged = u.transpose(1, 2).flatten(2)
        y = self.proj(merged) if weights is None else F.linear(merged, weights[1], self.proj.bias)
        y = finish(y, call, self.mitigation, self.observer)
        first = values if v0 is None else v0
        return self.proj_drop(y), first, call.kept, call if self.mitigation.overrides("stream") else None


class Mlp(nn.Module):
    """Two linear layers with a nonlinearity between."""

    def __init__(self, dim: int, hidden: int, dropout: float, activation: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = activation()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.fc1, self.act, self.fc2, self.drop)
        is_gelu = type(self.act) is nn.GELU and self.act.approximate == "none"
        is_plain = is_gelu and not (self.training and self.drop.p > 0)  # fc2(GELU(fc1(x))) and nothing else
        if is_plain and mlp.is_available(x, self.fc1, self.fc2) and all(map(_is_bare, layers)):
            return mlp.mlp(x, self.fc1, self.fc2)
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))  # type: ignore[no-any-return]


def _is_bare(module: nn.Module) -> bool:
    """Whether a module's work may be done without calling it: no hooks, no forward of its own, not compiled alone."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not any(hooks) and "forward" not in module.__dict__ and module._compiled_call_impl is None


class LayerScale(nn.Module):
    """A learnt gain per channel on a residual branch (https://arxiv.org/abs/2103.17239)."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Dropout):
    """Stochastic depth: training skips the branch for some samples, at random, and scales up the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.p == 0 or not self.training else x * super().forward(x.new_ones(x.shape[0], 1, 1))


class Block(nn.Module):
    """Attention and MLP, each in a residual branch, with its norm before the branch or after the sum."""

    def __init__(self, config: ModelConfig, drop_path: float = 0.0, layer: int = 1) -> None:
        super().__init__()
        gain = config.layer_scale
        self.post_norm = config.norm == "post"
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config, layer)
        self.ls1 = nn.Identity() if gain is None else LayerScale(config.dim, gain)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = Mlp(config.dim, config.hidden, config.dropout, config.activation)
        self.ls2 = nn.Identity() if gain is None else LayerScale(config.dim, gain)
        self.drop_path2 = DropPath(drop_path)

    def forward(
        self, x: Tensor, v0: Tensor | None, weights: Weights | None = None, previous: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The tokens, the first layer's values and, if a mitigation keeps something for the next layer, that."""
        y, first, kept, call = self.attn(x if self.post_norm else self.norm1(x), v0, weights, x, previous)
        out = x + self.drop_path1(self.ls1(y)).to(x.dtype)  # a float32 gain leaves the stream's dtype as it is
        out = self.norm1(out) if self.post_norm else out
        y = self.mlp(out if self.post_norm else self.norm2(out))
        out = out + self.drop_path2(self.ls2(y)).to(out.dtype)
        out = self.norm2(out) if self.post_norm else out
        out = out if call is None else self.attn.mitigation.stream(x, out, call)
        return (out, first) if kept is None else (out, first, kept)
