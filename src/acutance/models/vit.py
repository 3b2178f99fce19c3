"""A small readable vision Transformer whose state-dict keys are timm's, and the papers' models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import Mitigation, as_mitigation
from acutance.models.block import AttentionKind, BlockConfig, NormPlace, PatchEmbed
from acutance.models.stack import (
    BlockStack,
    ModelConfig,
    init_linear,
    learnt_tokens,
    make_blocks,
    resize_position_embedding,
)

Stream = Literal["float32", "autocast"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelConfig):
    """The choices behind a `ViT`; its fields are the model's keyword arguments."""

    image_size: int  # pixels a side; images are square
    patch_size: int  # pixels a side; each patch becomes one token
    dim: int  # channels of a token, shared out among the heads
    depth: int  # number of blocks
    heads: int
    num_classes: int
    in_chans: int = 3
    mlp_ratio: float = 4.0  # hidden channels of the MLP, in units of dim
    qkv_bias: bool = True
    attention: AttentionKind = "softmax"  # the kernel; symmetric shares queries and keys, so W_Q disappears
    mitigation: str | None = None  # as a spec, e.g. "neutreno:0.6"
    mitigation_layers: tuple[int, ...] | None = None  # 1 is the first; None is every layer
    class_token: bool = True  # without one the classifier reads the mean over patches
    distilled: bool = False  # DeiT's second token and second head
    registers: int = 0  # spare prefix tokens that no head reads
    norm: NormPlace = "pre"  # before each branch; post normalises each residual sum, as the first Transformer did
    layer_scale: float | None = None  # initial per-channel gain of both branches; None leaves it out
    drop_path: float = 0.0  # chance of skipping a branch in the last block, growing linearly from 0 in the first
    dropout: float = 0.0  # after the embedding, the projections and in the MLP
    attention_dropout: float = 0.0  # on the attention weights
    stream: Stream = "float32"  # of the tokens between blocks under autocast; in its own dtype a step is faster

    def __post_init__(self) -> None:
        self.check("image_size", "patch_size", "num_classes", "in_chans")
        self.check_word("norm", NormPlace)
        self.check_word("stream", Stream)
        if self.stream == "autocast" and (self.norm == "post" or self.layer_scale is not None):
            raise AcutanceError(
                "under autocast a layer_scale and a norm after the sum give float32 tokens: leave stream='float32'"
            )
        if self.distilled and not self.class_token:
            raise AcutanceError("a distilled model needs its class token: set class_token=True")

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens in front of the patches."""
        return int(self.class_token) + int(self.distilled) + self.registers


class ViT(BlockStack):
    """A vision Transformer for classification (https://arxiv.org/abs/2010.11929, https://arxiv.org/abs/2012.12877).

    Args:
        mitigation: a `Mitigation`, its spec such as `neutreno:0.6`, or None.
        **options: the fields of `ViTConfig`.
    """

    config_class = ViTConfig
    undecayed = ("pos_embed", "cls_token", "dist_token", "reg_token")

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        chosen = as_mitigation(mitigation)
        self._config = config = ViTConfig(mitigation=None if mitigation is None else chosen.spec, **options)
        self.prefix_tokens = config.prefix_tokens
        self.cls_token = learnt_tokens(1, config.dim) if config.class_token else None
        self.dist_token = learnt_tokens(1, config.dim) if config.distilled else None
        self.reg_token = learnt_tokens(config.registers, config.dim) if config.registers else None
        self.pos_embed = learnt_tokens(config.prefix_tokens + config.grid[0] * config.grid[1], config.dim)
        self.patch_embed = PatchEmbed(config.in_chans, config.patch_size, config.dim)
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config, config.depth, config.drop_path)
        self.norm = nn.LayerNorm(config.dim, eps=BlockConfig.norm_eps)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.head_dist = nn.Linear(config.dim, config.num_classes) if config.distilled else None
        self.apply(init_linear)
        self.install(chosen, config.mitigation_layers)

    def fit_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A position embedding of another image size is resized, bicubic."""
        fitted = dict(state)
        if "pos_embed" in fitted and fitted["pos_embed"].shape != self.pos_embed.shape:
            fitted["pos_embed"] = resize_position_embedding(fitted["pos_embed"], self._config.grid, self.prefix_tokens)
        return fitted

    def forward_features(self, images: Tensor) -> Tensor:
        """Tokens after the final norm, prefix tokens first: (batch, tokens, dim)."""
        expected = (self._config.in_chans, self._config.image_size, self._config.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ShapeError(
                f"images {tuple(images.shape)}: this model takes (batch, {', '.join(map(str, expected))}). "
                "Resize them, or build another image_size and load the weights with acutance.io.load_checkpoint"
            )
        learnt = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        patches = self.patch_embed(images)
        x = torch.cat([*(token.expand(len(images), -1, -1) for token in learnt), patches], dim=1) + self.pos_embed
        x = self.pos_drop(x.to(patches.dtype) if self._config.stream == "autocast" else x)
        out: Tensor = self.norm(self.run_blocks(x))
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


def deit_tiny(**options: Any) -> ViT:
    """DeiT-tiny/16 for 224×224 (https://arxiv.org/abs/2012.12877): 5,717,416 parameters."""
    body = {"image_size": 224, "patch_size": 16, "dim": 192, "depth": 12, "heads": 3, "num_classes": 1000}
    return ViT(**{**body, **options})


def deit_small(**options: Any) -> ViT:
    """DeiT-small/16 for 224×224 (https://arxiv.org/abs/2012.12877): 22,050,664 parameters."""
    return deit_tiny(**{"dim": 384, "heads": 6, **options})


def deit_base(**options: Any) -> ViT:
    """DeiT-base/16 for 224×224 (https://arxiv.org/abs/2012.12877): 86,567,656 parameters."""
    return deit_tiny(**{"dim": 768, "heads": 12, **options})


def vit_tiny_cifar(**options: Any) -> ViT:
    """DeiT-tiny's body on 32×32 images in 4×4 patches, 100 classes."""
    return deit_tiny(**{"image_size": 32, "patch_size": 4, "num_classes": 100, **options})


def vit_tiny_plus(**options: Any) -> ViT:
    """ViT-Ti⁺: `vit_tiny_cifar` with H = V ψ² Vᵀ, V by QR, which smooths (https://arxiv.org/abs/2401.04301)."""
    return vit_tiny_cifar(**{"mitigation": "eigen:positive", **options})


def vit_tiny_minus(**options: Any) -> ViT:
    """ViT-Ti⁻: `vit_tiny_cifar` with H = −V ψ² Vᵀ, V by QR, which sharpens (https://arxiv.org/abs/2401.04301).

    QR is the paper's, and the slowest basis on a GPU. Faster ones reach the same H: `eigen:negative,basis=polar` with
    CUDA graphs, `eigen:negative,basis=householder` without.
    """
    return vit_tiny_cifar(**{"mitigation": "eigen:negative", **options})


def vit_digits(**options: Any) -> ViT:
    """A ViT for the embedded 8×8 digits in 2×2 patches: 16 patches and a class token."""
    body = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 48, "depth": 12, "heads": 3, "num_classes": 10}
    return ViT(**{**body, **options})
