"""Segmenter (https://arxiv.org/abs/2105.05633): a ViT encoder and a mask Transformer, with the public code's names.

NeuTRENO stands in both, each with its own v⁰, as in its public code.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import ShapeError
from acutance.mitigations import Mitigation
from acutance.models import vit
from acutance.models.block import AttentionKind, ModelConfig


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig(ModelConfig):
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
    norm_eps, resizing = 1e-5, "bilinear"  # the public code's, unlike timm's
    class_token, distilled, registers, stream = True, False, 0, "float32"  # of the encoder, as a ViT's


class MaskTransformer(vit.BlockStack):
    """The decoder: patches and one embedding per class attend to each other; a mask is the cosine between the two."""

    final_norm = "decoder_norm"

    def __init__(self, config: SegmenterConfig) -> None:
        super().__init__()
        scale, self.suffix_tokens = config.dim**-0.5, config.num_classes
        own = {name: value for name, value in vars(config).items() if name.startswith("decoder_")}
        self.blocks = vit.make_blocks(replace(config, **{n.removeprefix("decoder_"): own[n] for n in own}))
        self.cls_emb = vit.learnt_tokens(config.num_classes, config.dim)
        self.proj_dec = nn.Linear(config.dim, config.dim)
        self.proj_patch = nn.Parameter(scale * torch.randn(config.dim, config.dim))
        self.proj_classes = nn.Parameter(scale * torch.randn(config.dim, config.dim))
        self.decoder_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mask_norm = nn.LayerNorm(config.num_classes, eps=config.norm_eps)
        self.apply(vit.init_linear)

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

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config = SegmenterConfig(**options)
        self.encoder, self.decoder = vit.Encoder(config).apply(vit.init_linear), MaskTransformer(config)
        self.encoder.install(mitigation)
        self.decoder.install(mitigation)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) of any size to scores (batch, classes, height, width)."""
        config = self._config
        if images.ndim != 4 or images.shape[1] != config.in_chans or 0 in images.shape[2:]:
            raise ShapeError(f"images {tuple(images.shape)}: give (batch, {config.in_chans}, height, width)")
        height, width = images.shape[2:]
        side = config.patch_size
        padded = F.pad(images, (0, -width % side, 0, -height % side))
        patches = self.encoder(padded)[:, self.encoder.prefix_tokens :]
        masks = self.decoder(patches).transpose(1, 2).unflatten(2, (-1, padded.shape[3] // side))
        return F.interpolate(masks, size=padded.shape[2:], mode="bilinear")[..., :height, :width]
