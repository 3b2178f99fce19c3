"""A stack of blocks: what the reference models have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import LayerShape, Mitigation, Weights, weights_together
from acutance.models.block import AttentionKind, Block, BlockConfig

INIT_STD = 0.02


class ModelConfig:
    """The base of the models' configurations, which are frozen dataclasses: to plain data and back."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        options = asdict(cast(Any, self)).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in options}

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

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        side: int = cast(Any, self).image_size // cast(Any, self).patch_size
        return side, side

    def check(self, *counts: str, heads: tuple[str, ...] = ("heads",)) -> None:
        """Refuse counts below 1, patches that do not tile the image, heads that do not divide dim, unknown words."""
        own = cast(Any, self)
        for name in ("dim", "depth", *heads, *counts):
            if getattr(own, name) < 1:
                raise AcutanceError(f"{name} must be at least 1, not {getattr(own, name)}")
        if "patch_size" in counts and own.image_size % own.patch_size:
            raise AcutanceError(f"image_size {own.image_size} is no multiple of patch_size {own.patch_size}")
        for name in heads:
            if own.dim % getattr(own, name):
                raise AcutanceError(
                    f"dim {own.dim} cannot be shared out among {getattr(own, name)} heads: choose a multiple"
                )
        self.check_word("attention", AttentionKind)
        layers: tuple[int, ...] | None = getattr(own, "mitigation_layers", None)
        if layers is not None:  # a list when it comes from JSON
            object.__setattr__(self, "mitigation_layers", tuple(sorted(set(layers))))
            if unknown := [layer for layer in layers if not 1 <= layer <= own.depth]:
                raise AcutanceError(f"mitigation_layers {unknown}: the layers are numbered 1 to {own.depth}")

    def check_word(self, name: str, kind: Any) -> None:
        """Refuse a word that the type does not list."""
        known, chosen = get_args(kind), getattr(self, name, None)
        if hasattr(self, name) and chosen not in known:
            raise AcutanceError(f"unknown {name} {chosen!r}; known: {', '.join(known)}")


class BlockStack(nn.Module):
    """Blocks that run one after another and hand on the first one's values; layers are numbered from 1."""

    blocks: nn.ModuleList
    norm: nn.Module
    checkpointing = False
    prefix_tokens: int = 0  # in front of the content, such as a class token
    suffix_tokens: int = 0  # behind the content, such as a decoder's embeddings of classes
    undecayed: tuple[str, ...] = ()
    _config: Any

    @property
    def config(self) -> Any:
        """What rebuilds this model, with the mitigation it carries now."""
        spec, layers = self.carried()
        return replace(self._config, mitigation=spec, mitigation_layers=layers)

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last block."""
        return self.norm

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations (non-reentrant)."""
        self.checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimiser should leave out of weight decay, beside biases and norms."""
        return {n for n, _ in self.named_parameters() if n in self.undecayed or ".mitigation." in n}

    def fit_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Another model's weights as this one wants them, where that takes no guess: another image size, say."""
        return dict(state)

    def run_blocks(self, x: Tensor) -> Tensor:
        """All blocks, with v⁰ passed from each to the next."""
        v0: Tensor | None = None
        for block, weights in zip(self.blocks, self._made_weights(), strict=True):
            if self.checkpointing and torch.is_grad_enabled():
                x, v0 = checkpoint(block, x, v0, *weights, use_reentrant=False)
            else:
                x, v0 = block(x, v0, *weights)
            if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not x.requires_grad:
                _refuse_cut_graph(block)
        return x

    def named_blocks(self) -> list[tuple[str, Block]]:
        """The blocks with their paths in `blocks`, first to last; they may sit inside wrappers."""
        return [(name, module) for name, module in self.blocks.named_modules() if isinstance(module, Block)]

    def carried(self) -> tuple[str | None, tuple[int, ...] | None]:
        """The mitigation in the blocks now as a spec, and the layers that have it; None where all have."""
        found = [(layer, block.attn.mitigation) for layer, (_, block) in enumerate(self.named_blocks(), 1)]
        specs = {layer: carried.spec for layer, carried in found if type(carried) is not Mitigation}
        if len(set(specs.values())) > 1:
            raise AcutanceError(f"layers carry different mitigations, which one configuration cannot say: {specs}")
        layers = None if len(specs) in (0, len(self.blocks)) else tuple(specs)
        return next(iter(specs.values()), None), layers

    def install(self, mitigation: Mitigation, layers: tuple[int, ...] | None = None) -> None:
        """Build the model with a mitigation; into a trained one, `acutance.mitigate` puts it."""
        if type(mitigation) is Mitigation:
            return
        for layer, (_, block) in enumerate(self.named_blocks(), 1):
            if layers is None or layer in layers:
                attn = block.attn
                shape = LayerShape(layer, attn.heads * attn.head_dim, attn.heads, attn.head_dim, attn.heads)
                attn.install(mitigation.for_layer(shape))

    def _made_weights(self) -> list[tuple[()] | tuple[Weights]]:
        """W_V and W_proj of the blocks whose mitigation makes them, for all blocks at once."""
        blocks = [block for block in self.blocks if type(block) is Block]
        if len(blocks) < len(self.blocks):  # wrapped for sharding, say: only inside are the parameters whole
            return [()] * len(self.blocks)
        made = weights_together([block.attn.mitigation for block in blocks])
        return [() if weights is None else (weights,) for weights in made]


def make_blocks(config: ModelConfig, depth: int, drop_path: float = 0.0, **options: Any) -> nn.ModuleList:
    """Blocks with the configuration's fields and these options instead.

    Their stochastic depth grows linearly from 0 in the first to `drop_path` in the last.
    """
    shared = {field.name: getattr(config, field.name) for field in fields(BlockConfig) if hasattr(config, field.name)}
    if hasattr(config, "mlp_ratio"):
        shared["hidden"] = int(shared["dim"] * config.mlp_ratio)
    rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
    blocks = [Block(BlockConfig(**{**shared, **options}), rate) for rate in rates]
    for layer, block in enumerate(blocks, 1):
        block.attn.layer = layer
    return nn.ModuleList(blocks)


def learnt_tokens(count: int, dim: int) -> nn.Parameter:
    """Tokens (1, count, dim) that are parameters."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count, dim), std=INIT_STD))


def init_linear(module: nn.Module) -> None:
    """Truncated normal weights and no bias, as in DeiT; for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def resize_position_embedding(
    pos_embed: Tensor, grid: tuple[int, int], prefix_tokens: int, mode: Literal["bicubic", "bilinear"] = "bicubic"
) -> Tensor:
    """Interpolate the patch part of a position embedding; the prefix part is kept.

    Args:
        pos_embed: (1, prefix_tokens + side², dim), made for a square grid.
        grid: patches down and across wanted now.
        prefix_tokens: leading entries that belong to no patch.
        mode: bicubic and antialiased, as timm's ViTs do it, or plainly bilinear, as the public Segmenter does.
    """
    patches = pos_embed.shape[1] - prefix_tokens if pos_embed.ndim == 3 else -1
    side = math.isqrt(max(patches, 0))
    if side == 0 or side * side != patches:
        raise ShapeError(
            f"position embedding {tuple(pos_embed.shape)} with {prefix_tokens} prefix tokens is not "
            "(1, prefix + side², dim): check class_token, distilled and registers"
        )
    if (side, side) == tuple(grid):
        return pos_embed
    prefix, image = pos_embed[:, :prefix_tokens], pos_embed[:, prefix_tokens:]
    image = image.reshape(len(image), side, side, -1).permute(0, 3, 1, 2)
    exact = image.to(torch.promote_types(image.dtype, torch.float32))  # in half precision it is coarse
    resized = nn.functional.interpolate(exact, size=tuple(grid), mode=mode, antialias=mode == "bicubic")
    return torch.cat([prefix, resized.to(pos_embed.dtype).flatten(2).transpose(1, 2)], dim=1)


def _refuse_cut_graph(block: nn.Module) -> None:
    """Re-entrant checkpointing cuts the graph when no input needs a gradient: nothing would be learnt."""
    if any(parameter.requires_grad for parameter in block.parameters()):
        raise AcutanceError(
            "a block has parameters to train but its output carries no gradient. Re-entrant checkpointing "
            "does this when the block's input needs no gradient (frozen embeddings, say): use "
            "model.set_grad_checkpointing(), which is non-reentrant, or use_reentrant=False"
        )
