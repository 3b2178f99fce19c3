"""A small readable vision Transformer whose state-dict keys are timm's.

The first layer's values travel in plain sight: every block is called `x, v0 = block(x, v0)`. Nothing is kept
on the side, so checkpointing, compiling and sharding see all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import Mitigation, Weights, as_mitigation, weights_together
from acutance.models.config import ViTConfig
from acutance.models.layers import DropPath, LayerScale, Mlp, PatchEmbed
from acutance.operator import AttentionOperator, AttentionRecord

if TYPE_CHECKING:
    from acutance.sites.reference import BlockSite

NORM_EPS = 1e-6
INIT_STD = 0.02


class Attention(nn.Module):
    """Multi-head self-attention with a place for a mitigation and an observer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.dim // config.heads
        self.kernel = config.attention
        self.attention_dropout = config.attention_dropout
        if self.kernel == "symmetric":
            self.kv = nn.Linear(config.dim, 2 * config.dim, bias=config.qkv_bias)
        else:
            self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.dim, config.dim)
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
        q, k, v = self._project(x, weights)
        first = v if v0 is None else v0
        A = AttentionOperator(q, k, kernel=self.kernel)
        v = self.mitigation.values(v, first)
        u = A.apply(v, dropout=self.attention_dropout if self.training else 0.0)
        u = self.mitigation.output(u, v, first, A)
        merged = u.transpose(1, 2).flatten(2)
        y = self.proj(merged) if weights is None else F.linear(merged, weights[1], self.proj.bias)
        y = self.mitigation.features(y, x)
        if self.observer is not None:
            self.observer(AttentionRecord(operator=A, values=v, first_values=v0, output=u, branch=y))
        return self.proj_drop(y), first

    def _project(self, x: Tensor, weights: Weights | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (batch, heads, tokens, head_dim)."""
        layer = self.value_projection
        if weights is None:
            projected: Tensor = layer(x)
        else:
            projected = F.linear(x, torch.cat([layer.weight, weights[0]]), layer.bias)
        by_head = projected.reshape(*x.shape[:2], -1, self.heads, self.head_dim)
        parts = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        return parts[0], parts[-2], parts[-1]  # symmetric: the one projection is both q and k


class Block(nn.Module):
    """Attention and MLP, each in a residual branch, with its norm before the branch or after the sum."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.post_norm = config.norm == "post"
        self.norm1 = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.attn = Attention(config)
        self.ls1 = _layer_scale(config)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.mlp = Mlp(config.dim, int(config.dim * config.mlp_ratio), config.dropout)
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


class ViT(nn.Module):
    """A vision Transformer for classification (https://arxiv.org/abs/2010.11929, https://arxiv.org/abs/2012.12877).

    Args:
        mitigation: a `Mitigation`, its spec such as `neutreno:0.6`, or None.
        **options: the fields of `ViTConfig`.
    """

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        chosen = as_mitigation(mitigation)
        self._config = config = ViTConfig(mitigation=None if mitigation is None else chosen.spec, **options)
        self.checkpointing = False
        self.cls_token = _tokens(1, config.dim) if config.class_token else None
        self.dist_token = _tokens(1, config.dim) if config.distilled else None
        self.reg_token = _tokens(config.registers, config.dim) if config.registers else None
        self.pos_embed = _tokens(config.prefix_tokens + config.grid[0] * config.grid[1], config.dim)
        self.patch_embed = PatchEmbed(config.in_chans, config.patch_size, config.dim)
        self.pos_drop = nn.Dropout(config.dropout)
        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.head_dist = nn.Linear(config.dim, config.num_classes) if config.distilled else None
        self.apply(_init_linear)
        self._install(chosen, config.mitigation_layers)

    @property
    def config(self) -> ViTConfig:
        """What rebuilds this model, with the mitigation it carries now."""
        carried = {site.layer: site.mitigation.spec for site in self._sites() if site.mitigation is not None}
        if len(set(carried.values())) > 1:
            raise AcutanceError(f"layers carry different mitigations, which one configuration cannot say: {carried}")
        layers = None if len(carried) in (0, self._config.depth) else tuple(carried)
        return replace(self._config, mitigation=next(iter(carried.values()), None), mitigation_layers=layers)

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens in front of the patches."""
        return self._config.prefix_tokens

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations (non-reentrant)."""
        self.checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimiser should leave out of weight decay, beside biases and norms."""
        named = {"pos_embed", "cls_token", "dist_token", "reg_token"}
        return {n for n, _ in self.named_parameters() if n in named or ".mitigation." in n}

    def forward_features(self, images: Tensor) -> Tensor:
        """Tokens after the final norm, prefix tokens first: (batch, tokens, dim)."""
        x = self._embed(images)
        v0: Tensor | None = None
        for block, weights in zip(self.blocks, self._made_weights(), strict=True):
            x, v0 = self._run(block, x, v0, *weights)
        out: Tensor = self.norm(x)
        return out

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Class scores; when distilled, (head, head_dist) in training and their mean in evaluation."""
        tokens = self.forward_features(images)
        pooled = tokens[:, 0] if self.cls_token is not None else tokens[:, self.prefix_tokens :].mean(dim=1)
        scores: Tensor = self.head(pooled)
        if self.head_dist is None:
            return scores
        distilled: Tensor = self.head_dist(tokens[:, 1])
        return (scores, distilled) if self.training else (scores + distilled) / 2

    def _embed(self, images: Tensor) -> Tensor:
        expected = (self._config.in_chans, self._config.image_size, self._config.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ShapeError(
                f"images {tuple(images.shape)}: this model takes (batch, {', '.join(map(str, expected))}). "
                "Resize them, or build another image_size and load the weights with models.load_checkpoint"
            )
        prefix = [
            t.expand(len(images), -1, -1) for t in (self.cls_token, self.dist_token, self.reg_token) if t is not None
        ]
        x = torch.cat([*prefix, self.patch_embed(images)], dim=1) + self.pos_embed
        embedded: Tensor = self.pos_drop(x)
        return embedded

    def _made_weights(self) -> list[tuple[()] | tuple[Weights]]:
        """W_V and W_proj of the blocks whose mitigation makes them, for all blocks at once."""
        blocks = [block for block in self.blocks if type(block) is Block]
        if len(blocks) < len(self.blocks):  # wrapped for sharding, say: only inside are the parameters whole
            return [()] * len(self.blocks)
        made = weights_together([block.attn.mitigation for block in blocks])
        return [() if weights is None else (weights,) for weights in made]

    def _run(self, block: nn.Module, x: Tensor, v0: Tensor | None, *weights: Weights) -> tuple[Tensor, Tensor]:
        if self.checkpointing and torch.is_grad_enabled():
            x, first = checkpoint(block, x, v0, *weights, use_reentrant=False)
        else:
            x, first = block(x, v0, *weights)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not x.requires_grad:
            _refuse_cut_graph(block)
        return x, first

    def _install(self, mitigation: Mitigation, layers: tuple[int, ...] | None) -> None:
        if type(mitigation) is Mitigation:
            return
        for site in self._sites():
            if layers is None or site.layer in layers:
                site.install(mitigation.for_layer(site.shape()))

    def _sites(self) -> list[BlockSite]:
        from acutance.sites.reference import block_sites  # sites import models, so not at the top

        return block_sites(self)


def _tokens(count: int, dim: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count, dim), std=INIT_STD))


def _layer_scale(config: ViTConfig) -> nn.Module:
    return nn.Identity() if config.layer_scale is None else LayerScale(config.dim, config.layer_scale)


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _refuse_cut_graph(block: nn.Module) -> None:
    """Re-entrant checkpointing cuts the graph when no input needs a gradient: nothing would be learnt."""
    if any(parameter.requires_grad for parameter in block.parameters()):
        raise AcutanceError(
            "a block has parameters to train but its output carries no gradient. Re-entrant checkpointing "
            "does this when the block's input needs no gradient (frozen embeddings, say): use "
            "model.set_grad_checkpointing(), which is non-reentrant, or use_reentrant=False"
        )
