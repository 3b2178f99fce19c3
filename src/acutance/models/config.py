"""What the reference models are made of, as plain JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, Self, cast, get_args

from acutance.errors import AcutanceError

AttentionKind = Literal["softmax", "symmetric", "rbf", "linear", "polynomial"]
NormPlace = Literal["pre", "post"]
Stream = Literal["float32", "autocast"]


class ModelConfig:
    """The base of the models' configurations, which are frozen dataclasses: to plain data and back."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(cast(Any, self)).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown or missing fields are named."""
        if not isinstance(data, Mapping):
            raise AcutanceError(f"a model configuration is a mapping, not a {type(data).__name__}")
        known = {field.name for field in fields(cast(Any, cls))}
        if unknown := sorted(set(data) - known):
            raise AcutanceError(f"unknown model options {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        try:
            return cls(**data)
        except TypeError as error:
            raise AcutanceError(f"not a complete model configuration: {error}") from error


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
        _check_positive(self, "image_size", "patch_size", "dim", "depth", "heads", "num_classes", "in_chans")
        if self.image_size % self.patch_size:
            raise AcutanceError(f"image_size {self.image_size} is no multiple of patch_size {self.patch_size}")
        _check_attention(self.dim, self.heads, self.attention)
        if self.norm not in get_args(NormPlace):
            raise AcutanceError(f"unknown norm {self.norm!r}; known: {', '.join(get_args(NormPlace))}")
        if self.stream not in get_args(Stream):
            raise AcutanceError(f"unknown stream {self.stream!r}; known: {', '.join(get_args(Stream))}")
        if self.stream == "autocast" and (self.norm == "post" or self.layer_scale is not None):
            raise AcutanceError(
                "under autocast a layer_scale and a norm after the sum give float32 tokens: leave stream='float32'"
            )
        if self.distilled and not self.class_token:
            raise AcutanceError("a distilled model needs its class token: set class_token=True")
        object.__setattr__(self, "mitigation_layers", _checked_layers(self.mitigation_layers, self.depth))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens in front of the patches."""
        return int(self.class_token) + int(self.distilled) + self.registers


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(ModelConfig):
    """The choices behind a `LanguageModel`; the defaults are NeuTRENO's WikiText-103 model."""

    vocabulary: int = 267_735  # words, the most frequent first
    dim: int = 128
    depth: int = 16
    heads: int = 8
    hidden: int = 2048  # channels inside the MLP
    cutoffs: tuple[int, ...] = (20_000, 40_000, 200_000)  # where the softmax changes to rarer words; () is a plain one
    mitigation: str | None = None  # as a spec, e.g. "neutreno:0.4"
    mitigation_layers: tuple[int, ...] | None = None  # 1 is the first; None is every layer
    dropout: float = 0.1  # after the embedding, the projections, in the MLP and before the softmax
    attention_dropout: float = 0.0  # on the attention weights; the public code has none

    def __post_init__(self) -> None:
        _check_positive(self, "vocabulary", "dim", "depth", "heads", "hidden")
        _check_attention(self.dim, self.heads)
        if self.dim % 2:
            raise AcutanceError(f"dim {self.dim} must be even: positions are pairs of a sine and a cosine")
        cutoffs = tuple(self.cutoffs)
        object.__setattr__(self, "cutoffs", cutoffs)
        ends = (0, *cutoffs, self.vocabulary)
        if any(low >= high for low, high in pairwise(ends)):
            raise AcutanceError(
                f"cutoffs {cutoffs} must grow and stay below the vocabulary of {self.vocabulary}: () is a plain softmax"
            )
        object.__setattr__(self, "mitigation_layers", _checked_layers(self.mitigation_layers, self.depth))


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

    def __post_init__(self) -> None:
        counts = ("num_classes", "image_size", "patch_size", "dim", "depth", "heads", "in_chans")
        _check_positive(self, *counts, "decoder_depth", "decoder_heads")
        if self.image_size % self.patch_size:
            raise AcutanceError(f"image_size {self.image_size} is no multiple of patch_size {self.patch_size}")
        _check_attention(self.dim, self.heads, self.attention)
        _check_attention(self.dim, self.decoder_heads)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across that positions are learnt for."""
        side = self.image_size // self.patch_size
        return side, side


def _check_positive(config: ModelConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise AcutanceError(f"{name} must be at least 1, not {getattr(config, name)}")


def _check_attention(dim: int, heads: int, kind: str = "softmax") -> None:
    if dim % heads:
        raise AcutanceError(f"dim {dim} cannot be shared out among {heads} heads: choose a multiple")
    if kind not in get_args(AttentionKind):
        raise AcutanceError(f"unknown attention {kind!r}; known: {', '.join(get_args(AttentionKind))}")


def _checked_layers(layers: Sequence[int] | None, depth: int) -> tuple[int, ...] | None:
    """Layer numbers in order, once each; a list when they come from JSON."""
    if layers is None:
        return None
    chosen = tuple(sorted(set(layers)))
    unknown = [layer for layer in chosen if not 1 <= layer <= depth]
    if unknown:
        raise AcutanceError(f"mitigation_layers {unknown}: the layers are numbered 1 to {depth}")
    return chosen
