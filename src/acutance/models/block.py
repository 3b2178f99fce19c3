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
from acutance.attention.operator import AttentionOperator
from acutance.mitigations import Mitigation, Weights
from acutance.mitigations.projection import Projection, weight_with
from acutance.models.config import AttentionKind, NormPlace
from acutance.models.layers import Activation, DropPath, LayerScale, Mlp


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

    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        """W_Q, W_K, W_V and W_proj. In symmetric attention W_Q is W_K."""
        joint, dim = self.value_projection, self.heads * self.head_dim
        start = 0 if self.kernel == "symmetric" else dim
        rows = slice(0, dim), slice(start, start + dim), slice(start + dim, start + 2 * dim)
        q, k, v = (Projection(joint, one) for one in rows)
        return q, k, v, Projection(self.proj)

    def install(self, mitigation: Mitigation) -> None:
        """Put a mitigation built for this layer in place of the identity."""
        mitigation.parametrise(*self.projections()[2:])
        self.mitigation = mitigation

    def uninstall(self) -> None:
        """Give the weights back and put the identity in place of the mitigation."""
        self.mitigation.unparametrise(*self.projections()[2:])
        self.mitigation = Mitigation()

    def forward(
        self, x: Tensor, v0: Tensor | None, weights: Weights | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, AttentionCall | None]:
        """The branch's output, the first layer's values, and the call if the mitigation's `stream` needs it.

        Args:
            x: the tokens after the norm.
            v0: the first layer's values; None in the first layer, which returns its own.
            weights: W_V and W_proj, if a mitigation made them for all layers at once. They are an argument so that
                checkpointing does not make them again.
            residual: what the branch's output will be added to.
        """
        weights = self.mitigation.weights() if weights is None else weights
        call = self._call(x, v0, self._project(x, weights), residual)
        u, values = attend(call, self.mitigation, self.observer)
        merged = u.transpose(1, 2).flatten(2)
        y = self.proj(merged) if weights is None else F.linear(merged, weights[1], self.proj.bias)
        y = finish(y, call, self.mitigation, self.observer)
        first = values if v0 is None else v0
        return self.proj_drop(y), first, call if self.mitigation.overrides("stream") else None

    def _call(self, x: Tensor, v0: Tensor | None, projected: Tensor, residual: Tensor | None) -> AttentionCall:
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
        return AttentionCall(
            layer=self.layer, x=x, residual=residual, q=q, k=k, v=v, first=v0, product=own, packed=projected, **options
        )

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
        residual = x
        y, first, call = self.attn(x if self.post_norm else self.norm1(x), v0, weights, residual)
        x = x + self.drop_path1(self.ls1(y))
        if self.post_norm:
            x = self.norm1(x)
            x = self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))))
        else:
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x if call is None else self.attn.mitigation.stream(residual, x, call), first


def _layer_scale(config: BlockConfig) -> nn.Module:
    return nn.Identity() if config.layer_scale is None else LayerScale(config.dim, config.layer_scale)
