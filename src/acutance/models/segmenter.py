"""Segmenter (https://arxiv.org/abs/2105.05633): a ViT encoder and a mask Transformer, with the public code's names.

NeuTRENO stands in both, each with its own v⁰, as in its public code.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import Mitigation
from acutance.models import vit
from acutance.models.block import AttentionKind

NORM_EPS = 1e-5  # the public code's, unlike timm's 1e-6


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig(vit.ModelConfig):
    """The choices behind a `Segmenter`; the defaults are the public code's, with DeiT-tiny as the encoder."""

    num_classes: int
    image_size: int = 512  # pixels a side that positions are learnt for; images may have any size
    patch_size: int = 16
    dim: int = 192
    depth: int = 12
    heads: int = 3
    in_chans: int = 3
    mlp_ratio: float = 4.0
    attention: AttentionKind = "softmax"  # of encoder and decoder
    mitigation: str | None = None  # of encoder and decoder, each with its own v⁰
    dropout: float = 0.0  # of the encoder, attention weights included
    drop_path: float = 0.1  # of the encoder's last block
    decoder_depth: int = 2
    decoder_heads: int = 3  # the public code has dim / 64
    decoder_dropout: float = 0.1  # attention weights included
    decoder_drop_path: float = 0.0  # the public code has none in the decoder


class Encoder(vit.BlockStack):
    """A ViT without its head, for images of any size that is a multiple of the patch."""

    prefix_tokens, resizing = 1, "bilinear"

    def __init__(self, config: SegmenterConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.cls_token = vit.learnt_tokens(1, config.dim)
        self.pos_embed = vit.learnt_tokens(1 + math.prod(config.grid), config.dim)
        self.patch_embed = vit.PatchEmbed(config.in_chans, config.patch_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        options = {"norm_eps": NORM_EPS, "attention_dropout": config.dropout}
        self.blocks = vit.make_blocks(config, config.depth, config.drop_path, **options)
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.apply(vit.init_linear)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens after the final norm, class token first: (batch, 1 + patches, dim)."""
        side = self.patch_embed.proj.kernel_size[0]
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), self.patch_embed(images)], dim=1)
        x = self.dropout(x + self.resized(self.pos_embed, (images.shape[-2] // side, images.shape[-1] // side)))
        return self.norm(self.run_blocks(x))  # type: ignore[no-any-return]


class MaskTransformer(vit.BlockStack):
    """The decoder: patches and one embedding per class attend to each other; a mask is the cosine between the two."""

    def __init__(self, config: SegmenterConfig) -> None:
        super().__init__()
        scale, dropout = config.dim**-0.5, config.decoder_dropout
        options = {"heads": config.decoder_heads, "dropout": dropout, "attention_dropout": dropout}
        self.suffix_tokens = config.num_classes
        depth, drop_path = config.decoder_depth, config.decoder_drop_path
        self.blocks = vit.make_blocks(config, depth, drop_path, norm_eps=NORM_EPS, **options)
        self.cls_emb = vit.learnt_tokens(config.num_classes, config.dim)
        self.proj_dec = nn.Linear(config.dim, config.dim)
        self.proj_patch = nn.Parameter(scale * torch.randn(config.dim, config.dim))
        self.proj_classes = nn.Parameter(scale * torch.randn(config.dim, config.dim))
        self.decoder_norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.mask_norm = nn.LayerNorm(config.num_classes, eps=NORM_EPS)
        self.apply(vit.init_linear)

    @property
    def final_norm(self) -> nn.Module:
        return self.decoder_norm

    def forward(self, patches: Tensor) -> Tensor:
        """Scores of every class for every patch: (batch, patches, dim) to (batch, patches, classes)."""
        x = torch.cat([self.proj_dec(patches), self.cls_emb.expand(len(patches), -1, -1)], dim=1)
        x = self.decoder_norm(self.run_blocks(x))
        seen, classes = x[:, : -self.suffix_tokens] @ self.proj_patch, x[:, -self.suffix_tokens :] @ self.proj_classes
        cosines = F.normalize(seen, dim=-1) @ F.normalize(classes, dim=-1).transpose(1, 2)
        return self.mask_norm(cosines)  # type: ignore[no-any-return]


class Segmenter(vit.ReferenceModel):
    """Scores of every class at every pixel.

    Its arguments are the fields of `SegmenterConfig`; `mitigation`, of both parts, may also be a `Mitigation`.
    """

    config_class = SegmenterConfig

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config = SegmenterConfig(**options)
        self.encoder = Encoder(config)
        self.decoder = MaskTransformer(config)
        self.encoder.install(mitigation)
        self.decoder.install(mitigation)

    @property
    def config(self) -> SegmenterConfig:
        """What rebuilds this model, with the mitigation it carries now."""
        encoder, decoder = self.encoder.carried(), self.decoder.carried()
        if encoder != decoder or encoder[1] is not None:
            raise AcutanceError(f"one configuration cannot say what differs: encoder {encoder}, decoder {decoder}")
        return replace(self._config, mitigation=encoder[0])

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) of any size to scores (batch, classes, height, width)."""
        config = self._config
        if images.ndim != 4 or images.shape[1] != config.in_chans or 0 in images.shape[2:]:
            raise ShapeError(f"images {tuple(images.shape)}: give (batch, {config.in_chans}, height, width)")
        height, width = images.shape[2:]
        side = config.patch_size
        padded = F.pad(images, (0, -width % side, 0, -height % side))
        grid = (padded.shape[2] // side, padded.shape[3] // side)
        patches = self.encoder(padded)[:, self.encoder.prefix_tokens :]
        masks = self.decoder(patches).transpose(1, 2).unflatten(2, grid)
        return F.interpolate(masks, size=padded.shape[2:], mode="bilinear")[..., :height, :width]
