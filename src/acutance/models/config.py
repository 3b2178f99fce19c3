"""What a vision Transformer is made of, as plain JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from acutance.errors import AcutanceError

AttentionKind = Literal["softmax", "symmetric", "rbf", "linear", "polynomial"]
NormPlace = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
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

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "dim", "depth", "heads", "num_classes", "in_chans"):
            if getattr(self, name) < 1:
                raise AcutanceError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.image_size % self.patch_size:
            raise AcutanceError(f"image_size {self.image_size} is no multiple of patch_size {self.patch_size}")
        if self.dim % self.heads:
            raise AcutanceError(f"dim {self.dim} cannot be shared out among {self.heads} heads: choose a multiple")
        if self.attention not in get_args(AttentionKind):
            raise AcutanceError(f"unknown attention {self.attention!r}; known: {', '.join(get_args(AttentionKind))}")
        if self.norm not in get_args(NormPlace):
            raise AcutanceError(f"unknown norm {self.norm!r}; known: {', '.join(get_args(NormPlace))}")
        if self.distilled and not self.class_token:
            raise AcutanceError("a distilled model needs its class token: set class_token=True")
        if self.mitigation_layers is not None:
            layers = tuple(sorted(set(self.mitigation_layers)))  # a list when it comes from JSON
            object.__setattr__(self, "mitigation_layers", layers)
            unknown = [layer for layer in layers if not 1 <= layer <= self.depth]
            if unknown:
                raise AcutanceError(f"mitigation_layers {unknown}: the layers are numbered 1 to {self.depth}")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens in front of the patches."""
        return int(self.class_token) + int(self.distilled) + self.registers

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = asdict(self)
        if self.mitigation_layers is not None:
            data["mitigation_layers"] = list(self.mitigation_layers)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown or missing fields are named."""
        if not isinstance(data, Mapping):
            raise AcutanceError(f"a model configuration is a mapping, not a {type(data).__name__}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise AcutanceError(f"unknown model options {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        try:
            return cls(**data)
        except TypeError as error:
            raise AcutanceError(f"not a complete model configuration: {error}") from error
