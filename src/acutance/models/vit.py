"""A small readable vision Transformer whose state-dict keys are timm's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from acutance.errors import ShapeError
from acutance.mitigations import Mitigation, as_mitigation
from acutance.models.block import BlockConfig
from acutance.models.config import ViTConfig
from acutance.models.layers import PatchEmbed
from acutance.models.position import resize_position_embedding
from acutance.models.stack import BlockStack, init_linear, learnt_tokens, make_blocks

NORM_EPS = 1e-6


class ViT(BlockStack):
    """A vision Transformer for classification (https://arxiv.org/abs/2010.11929, https://arxiv.org/abs/2012.12877).

    Args:
        mitigation: a `Mitigation`, its spec such as `neutreno:0.6`, or None.
        **options: the fields of `ViTConfig`.
    """

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        chosen = as_mitigation(mitigation)
        self._config = config = ViTConfig(mitigation=None if mitigation is None else chosen.spec, **options)
        self.cls_token = learnt_tokens(1, config.dim) if config.class_token else None
        self.dist_token = learnt_tokens(1, config.dim) if config.distilled else None
        self.reg_token = learnt_tokens(config.registers, config.dim) if config.registers else None
        self.pos_embed = learnt_tokens(config.prefix_tokens + config.grid[0] * config.grid[1], config.dim)
        self.patch_embed = PatchEmbed(config.in_chans, config.patch_size, config.dim)
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_blocks(_block_config(config), config.depth, config.drop_path)
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.head_dist = nn.Linear(config.dim, config.num_classes) if config.distilled else None
        self.apply(init_linear)
        self.install(chosen, config.mitigation_layers)

    @property
    def config(self) -> ViTConfig:
        """What rebuilds this model, with the mitigation it carries now."""
        spec, layers = self.carried()
        return replace(self._config, mitigation=spec, mitigation_layers=layers)

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens in front of the patches."""
        return self._config.prefix_tokens

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last block."""
        return self.norm

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimiser should leave out of weight decay, beside biases and norms."""
        named = {"pos_embed", "cls_token", "dist_token", "reg_token"}
        return {n for n, _ in self.named_parameters() if n in named or ".mitigation." in n}

    def fit_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A position embedding of another image size is resized, bicubic."""
        fitted = dict(state)
        if "pos_embed" in fitted and fitted["pos_embed"].shape != self.pos_embed.shape:
            fitted["pos_embed"] = resize_position_embedding(fitted["pos_embed"], self._config.grid, self.prefix_tokens)
        return fitted

    def forward_features(self, images: Tensor) -> Tensor:
        """Tokens after the final norm, prefix tokens first: (batch, tokens, dim)."""
        out: Tensor = self.norm(self.run_blocks(self._embed(images)))
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
        patches = self.patch_embed(images)
        x = torch.cat([*prefix, patches], dim=1) + self.pos_embed
        embedded: Tensor = self.pos_drop(x.to(patches.dtype) if self._config.stream == "autocast" else x)
        return embedded


def _block_config(config: ViTConfig) -> BlockConfig:
    return BlockConfig(
        dim=config.dim,
        heads=config.heads,
        hidden=int(config.dim * config.mlp_ratio),
        attention=config.attention,
        qkv_bias=config.qkv_bias,
        norm=config.norm,
        norm_eps=NORM_EPS,
        layer_scale=config.layer_scale,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
