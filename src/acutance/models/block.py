"""Attention and the block around it, shared by all reference models; parameters have timm's names.

The first layer's values travel in plain sight: every block is called `x, v0 = block(x, v0)`. Nothing is kept on the
side, so checkpointing, compiling and sharding see all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from acutance.attention import AttentionCall, attend, finish
from acutance.mitigations import Mitigation, Weights
from acutance.mitigations.made import weight_with
from acutance.models.config import AttentionKind, NormPlace
from acutance.models.layers import Activation, DropPath, LayerScale, Mlp
from acutance.operator import AttentionOperator


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What one block is made of; the models' own configurations say it in the user's words."""

    dim: int
    heads: int
    hidden: int  # channels inside the MLP
    attention: AttentionKind = "softmax"
    causal: bool = False
    qkv_bias: bool = True
    proj_bias: bool = True
    norm: NormPlace = "pre"
    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    layer_scale: float | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0


class Attention(nn.Module):
    """Multi-head self-attention with a place for a mitigation and an observer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.dim // config.heads
        self.kernel = config.attention
        self.causal = config.causal
        self.attention_dropout = config.attention_dropout
        if self.kernel == "symmetric":
            self.kv = nn.Linear(config.dim, 2 * config.dim, bias=config.qkv_bias)
        else:
            self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.dim, config.dim, bias=config.proj_bias)
        self.proj_drop = nn.Dropout(config.dropout)
        self.layer = 1  # depth; set by the stack of blocks
        self.mitigation = Mitigation()
        self.observer: Callable[[AttentionCall], None] | None = None

    @property
    def value_projection(self) -> nn.Linear:
        """The linear layer whose last `dim` rows are W_V."""
        return self.kv if self.kernel == "symmetric" else self.qkv

    def forward(self, x: Tensor, v0: Tensor | None, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """The branch's output and the first layer's values (this layer's own if none came in).

        A mitigation that makes W_V and W_proj is asked for them unless they come in, made for all layers at once. They
        are an argument, so that a block that checkpointing runs again has them without making them.
        """
        weights = self.mitigation.weights() if weights is None else weights
        call = self._call(x, v0, self._project(x, weights))
        u, values = attend(call, self.mitigation, self.observer)
        merged = u.transpose(1, 2).flatten(2)
        y = self.proj(merged) if weights is None else F.linear(merged, weights[1], self.proj.bias)
        y = finish(y, call, self.mitigation, self.observer)
        return self.proj_drop(y), values if v0 is None else v0

    def _call(self, x: Tensor, v0: Tensor | None, projected: Tensor) -> AttentionCall:
        q, k, v = self._split(projected)
        dropout = self.attention_dropout if self.training else 0.0

        def own(
            values: Tensor, other_q: Tensor | None = None, other_k: Tensor | None = None, bias: Any = None
        ) -> Tensor:
            A = AttentionOperator(
                q if other_q is None else other_q,
                k if other_k is None else other_k,
                mask=bias,
                kernel=self.kernel,
                causal=self.causal,
            )
            return A.apply(values, dropout)

        options: dict[str, Any] = {"causal": self.causal, "kernel": self.kernel, "dropout": dropout}
        return AttentionCall(self.layer, x=x, q=q, k=k, v=v, v0=v0, own=own, packed=projected, **options)

    def _project(self, x: Tensor, weights: Weights | None) -> Tensor:
        """q, k and v side by side, (batch, tokens, 3 · dim)."""
        layer = self.value_projection
        if weights is not None:
            return F.linear(x, weight_with(layer, weights[0]), layer.bias)
        projected: Tensor = layer(x)
        return projected

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (batch, heads, tokens, head_dim)."""
        by_head = projected.reshape(*projected.shape[:2], -1, self.heads, self.head_dim)
        parts = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        return parts[0], parts[-2], parts[-1]  # symmetric: the one projection is both q and k


class Block(nn.Module):
    """Attention and MLP, each in a residual branch, with its norm before the branch or after the sum."""

    def __init__(self, config: BlockConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.post_norm = config.norm == "post"
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = _layer_scale(config)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = Mlp(config.dim, config.hidden, config.dropout, config.activation)
        self.ls2 = _layer_scale(config)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, v0: Tensor | None, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """The next tokens, and the first layer's values passed on."""
        if self.post_norm:
            y, first = self.attn(x, v0, weights)
            x = self.norm1(x + self.drop_path1(self.ls1(y)))
            return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x)))), first
        y, first = self.attn(self.norm1(x), v0, weights)
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x, first


def _layer_scale(config: BlockConfig) -> nn.Module:
    return nn.Identity() if config.layer_scale is None else LayerScale(config.dim, config.layer_scale)
