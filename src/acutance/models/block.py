"""Attention and the block around it, shared by all reference models; parameters have timm's names.

The first layer's values travel in plain sight: every block is called `x, v0 = block(x, v0)`. Nothing is kept on the
side, so checkpointing, compiling and sharding see all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.kernels import packed
from acutance.kernels.epilogue import Epilogue
from acutance.mitigations import Mitigation, Weights
from acutance.models.config import AttentionKind, NormPlace
from acutance.models.layers import Activation, DropPath, LayerScale, Mlp
from acutance.operator import AttentionOperator, AttentionRecord


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
        self.mitigation = Mitigation()
        self.observer: Callable[[AttentionRecord], None] | None = None

    @property
    def value_projection(self) -> nn.Linear:
        """The linear layer whose last `dim` rows are W_V."""
        return self.kv if self.kernel == "symmetric" else self.qkv

    def forward(self, x: Tensor, v0: Tensor | None, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        """The branch's output and the first layer's values (this layer's own if none came in).

        A mitigation that makes W_V and W_proj is asked for them unless they come in, made for all layers at once.
        """
        weights = self.mitigation.weights() if weights is None else weights
        projected = self._project(x, weights)
        q, k, v = self._split(projected)
        first = v if v0 is None else v0
        fused = self._in_one_kernel(projected, v0)
        if fused is not None:
            merged, first = fused
        else:
            A = AttentionOperator(q, k, kernel=self.kernel, causal=self.causal)
            v = self.mitigation.values(v, first)
            u = A.apply(v, dropout=self.attention_dropout if self.training else 0.0)
            u = self.mitigation.output(u, v, first, A)
            merged = u.transpose(1, 2).flatten(2)
        y = self.proj(merged) if weights is None else F.linear(merged, weights[1], self.proj.bias)
        y = self.mitigation.features(y, x)
        if self.observer is not None:
            self.observer(AttentionRecord(operator=A, values=v, first_values=v0, output=u, branch=y))
        return self.proj_drop(y), first

    def _project(self, x: Tensor, weights: Weights | None) -> Tensor:
        """q, k and v side by side, (batch, tokens, 3 · dim)."""
        layer = self.value_projection
        if weights is not None:
            return F.linear(x, torch.cat([layer.weight, weights[0]]), layer.bias)
        projected: Tensor = layer(x)
        return projected

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (batch, heads, tokens, head_dim)."""
        by_head = projected.reshape(*projected.shape[:2], -1, self.heads, self.head_dim)
        parts = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        return parts[0], parts[-2], parts[-1]  # symmetric: the one projection is both q and k

    def _in_one_kernel(self, projected: Tensor, v0: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The heads' outputs side by side, by the kernel that does all at once, and v⁰; None where none does."""
        drops = self.training and self.attention_dropout > 0
        if drops or self.observer is not None or self.kernel != "softmax":
            return None
        if not packed.is_available(projected, self.heads):
            return None
        epilogue = self.mitigation.epilogue(Epilogue(causal=self.causal))
        if epilogue is None:
            return None
        given = (projected, self.heads, self.head_dim**-0.5)
        if v0 is None:
            merged, values = packed.first_attention(*given, self.causal, epilogue.contrast)
            return merged, values.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        first = v0.transpose(1, 2).flatten(2) if epilogue.uses_first_values else None
        merged = packed.attention(*given, first, epilogue.strength, self.causal, epilogue.contrast, epilogue.residual)
        return merged, v0


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
