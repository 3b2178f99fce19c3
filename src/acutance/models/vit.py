"""A small readable vision Transformer whose state-dict keys are timm's, and the papers' models by name.

`BlockStack`, the stack of blocks with v⁰ passed along, is shared with the other reference models.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import LayerShape, Mitigation, as_mitigation
from acutance.mitigations.eigen import weights_together
from acutance.models.block import AttentionKind, Block, ModelConfig, NormPlace

INIT_STD = 0.02
UNDECAYED = ("pos_embed", "cls_token", "dist_token", "reg_token", "cls_emb", "embed.weight")


class ReferenceModel(nn.Module):
    """What training and loading ask of a model, or of a part that has blocks."""

    checkpointing = False
    _config: Any

    @property
    def config(self) -> Any:
        """What rebuilds this model, with the mitigation it carries now."""
        found = [(name, block.attn.mitigation) for name, block in self.named_modules() if isinstance(block, Block)]
        specs = {name: mitigation.spec for name, mitigation in found if type(mitigation) is not Mitigation}
        numbers = tuple(layer for layer, (name, _) in enumerate(found, 1) if name in specs)
        layers = {"mitigation_layers": None if len(specs) in (0, len(found)) else numbers}
        takes_layers = hasattr(self._config, "mitigation_layers")
        if len(set(specs.values())) > 1 or not (takes_layers or layers["mitigation_layers"] is None):
            raise AcutanceError(f"one configuration cannot say what differs between blocks: {specs}")
        return replace(self._config, mitigation=next(iter(specs.values()), None), **(layers if takes_layers else {}))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations (non-reentrant)."""
        for part in self.modules():
            if isinstance(part, ReferenceModel):
                part.checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimiser should leave out of weight decay, beside biases and norms."""
        return {n for n, _ in self.named_parameters() if n.endswith(UNDECAYED) or ".mitigation." in n}

    def fit_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Another model's weights as this one wants them: positions resized, no head where an encoder has none."""
        fitted = dict(state)
        for path, part in self.named_modules():
            if isinstance(part, Encoder):
                key, head = f"{path}.pos_embed".lstrip("."), f"{path}.head.".lstrip(".")
                fitted = {n: x for n, x in fitted.items() if isinstance(part, ViT) or not n.startswith(head)}
                if key in fitted:
                    fitted[key] = resize_position_embedding(fitted[key], part.grid, part.prefix_tokens, part.resizing)
        return fitted


class BlockStack(ReferenceModel):
    """Blocks that run one after another and hand on the first one's values; layers are numbered from 1."""

    blocks: nn.ModuleList
    final_norm = "norm"  # the path of the norm behind the last block
    prefix_tokens: int = 0  # in front of the content, such as a class token
    suffix_tokens: int = 0  # behind the content, such as a decoder's embeddings of classes

    def run_blocks(self, x: Tensor) -> Tensor:
        """All blocks, with v⁰ passed from each to the next."""
        v0: Tensor | None = None
        kept: list[Tensor] = []  # what a mitigation of the block before hands on
        # Wrapped for sharding, say, a block makes its weights itself: only inside are the parameters whole.
        made = weights_together([block.attn.mitigation if type(block) is Block else None for block in self.blocks])
        for block, weights in zip(self.blocks, made, strict=True):
            if self.checkpointing and torch.is_grad_enabled():
                x, v0, *kept = checkpoint(block, x, v0, weights, *kept, use_reentrant=False)
            else:
                x, v0, *kept = block(x, v0, weights, *kept)
            is_cut = not torch.compiler.is_compiling() and torch.is_grad_enabled() and not x.requires_grad
            if is_cut and any(parameter.requires_grad for parameter in block.parameters()):
                raise AcutanceError("re-entrant checkpointing cuts gradients off: set_grad_checkpointing() keeps them")
        return x

    def named_blocks(self) -> list[tuple[str, Block]]:
        """The blocks with their paths in `blocks`, first to last; they may sit inside wrappers."""
        return [(name, module) for name, module in self.blocks.named_modules() if isinstance(module, Block)]

    def install(self, mitigation: Mitigation | str | None, layers: tuple[int, ...] | None = None) -> None:
        """Build the model with a mitigation; `acutance.mitigate` puts one into a trained model."""
        chosen = as_mitigation(mitigation)
        for layer, (_, block) in enumerate(self.named_blocks() if type(chosen) is not Mitigation else (), 1):
            if layers is None or layer in layers:
                attn = block.attn
                shape = LayerShape(layer, attn.heads * attn.head_dim, attn.heads, attn.head_dim, attn.heads)
                attn.mitigation = chosen.for_layer(shape)
                attn.mitigation.parametrise(*attn.projections()[2:])


def make_blocks(config: Any) -> nn.ModuleList:
    """The blocks of a model's configuration; stochastic depth grows linearly from 0 in the first."""
    rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
    return nn.ModuleList(Block(config, rate, layer) for layer, rate in enumerate(rates, 1))


def learnt_tokens(count: int, dim: int) -> nn.Parameter:
    """Tokens (1, count, dim) that are parameters."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count, dim), std=INIT_STD))


def init_linear(module: nn.Module) -> None:
    """Truncated normal weights and no bias, as in DeiT; for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each to one token.

    The patches are rows of one matrix product: a convolution would leave the channels apart in memory, and every norm
    after it would have to gather them.
    """

    def __init__(self, in_chans: int, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, patches, dim), row by row."""
        side = self.proj.kernel_size[0]
        cut = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (batch, channels, down, side, across, side)
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def resize_position_embedding(
    pos_embed: Tensor, grid: tuple[int, int], prefix_tokens: int, mode: Literal["bicubic", "bilinear"] = "bicubic"
) -> Tensor:
    """Interpolate a position embedding (1, prefix_tokens + side², dim) to `grid`, patches down and across.

    The prefix is kept. Bicubic is antialiased, as timm does it; bilinear is the public Segmenter's.
    """
    patches = pos_embed.shape[1] - prefix_tokens if pos_embed.ndim == 3 else -1
    if not (side := math.isqrt(max(patches, 0))) or side * side != patches:
        shape = f"{tuple(pos_embed.shape)} less {prefix_tokens} prefix tokens"
        raise ShapeError(f"position embedding {shape} is no square grid: check class_token, distilled and registers")
    if (side, side) == tuple(grid):
        return pos_embed
    prefix, image = pos_embed[:, :prefix_tokens], pos_embed[:, prefix_tokens:]
    image = image.reshape(len(image), side, side, -1).permute(0, 3, 1, 2)
    exact = image.to(torch.promote_types(image.dtype, torch.float32))  # in half precision it is coarse
    resized = F.interpolate(exact, size=tuple(grid), mode=mode, antialias=mode == "bicubic")
    return torch.cat([prefix, resized.to(pos_embed.dtype).flatten(2).transpose(1, 2)], dim=1)


class Encoder(BlockStack):
    """Images to tokens after the final norm: a ViT without its heads. The configuration is a ViT's or a Segmenter's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.resizing, self.stream = config.resizing, config.stream
        self.prefix_tokens = int(config.class_token) + int(config.distilled) + config.registers
        self.cls_token = learnt_tokens(1, config.dim) if config.class_token else None
        self.dist_token = learnt_tokens(1, config.dim) if config.distilled else None
        self.reg_token = learnt_tokens(config.registers, config.dim) if config.registers else None
        self.grid = (config.image_size // config.patch_size,) * 2  # patches down and across
        self.pos_embed = learnt_tokens(self.prefix_tokens + math.prod(self.grid), config.dim)
        self.patch_embed = PatchEmbed(config.in_chans, config.patch_size, config.dim)
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)

    def forward(self, images: Tensor) -> Any:
        """Prefix tokens first, (batch, tokens, dim); sides may be any multiples of the patch."""
        learnt = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        patches, side = self.patch_embed(images), self.patch_embed.proj.kernel_size[0]
        grid = (images.shape[2] // side, images.shape[3] // side)
        positions = resize_position_embedding(self.pos_embed, grid, self.prefix_tokens, self.resizing)
        x = torch.cat([*(token.expand(len(images), -1, -1) for token in learnt), patches], dim=1) + positions
        return self.norm(self.run_blocks(self.pos_drop(x.to(patches.dtype) if self.stream == "autocast" else x)))


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
    stream: Literal["float32", "autocast"] = "float32"  # tokens between blocks; autocast's dtype makes steps faster
    resizing = "bicubic"  # timm's, as is `norm_eps`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream == "autocast" and self.norm == "post":
            raise AcutanceError("a norm after the sum would give float32 tokens: leave stream='float32'")
        if self.distilled and not self.class_token:
            raise AcutanceError("a distilled model needs its class token: set class_token=True")


class ViT(Encoder):
    """A vision Transformer for classification (https://arxiv.org/abs/2010.11929, https://arxiv.org/abs/2012.12877).

    Its arguments are the fields of `ViTConfig`; `mitigation` may also be a `Mitigation`.
    """

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__(config := ViTConfig(**options))
        self._config = config
        self.head = nn.Linear(config.dim, config.num_classes)
        self.head_dist = nn.Linear(config.dim, config.num_classes) if config.distilled else None
        self.apply(init_linear)
        self.install(mitigation, config.mitigation_layers)

    def forward_features(self, images: Tensor) -> Tensor:
        """Tokens after the final norm, prefix tokens first: (batch, tokens, dim)."""
        expected = (self._config.in_chans, self._config.image_size, self._config.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            advice = "Resize them, or build another image_size and load the weights with acutance.io.load_checkpoint"
            raise ShapeError(f"images {tuple(images.shape)}: give (batch, *{expected}). {advice}")
        return super().forward(images)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Class scores; when distilled, (head, head_dist) in training and their mean in evaluation."""
        tokens = self.forward_features(images)
        pooled = tokens[:, 0] if self.cls_token is not None else tokens[:, self.prefix_tokens :].mean(dim=1)
        scores: Tensor = self.head(pooled)
        if self.head_dist is None:
            return scores
        distilled: Tensor = self.head_dist(tokens[:, 1])
        return (scores, distilled) if self.training else (scores + distilled) / 2


Preset = Callable[..., ViT]  # the papers' models by name; options of a ViT can be given, or given anew
deit_tiny: Preset = partial(ViT, image_size=224, patch_size=16, dim=192, depth=12, heads=3, num_classes=1000)
"""DeiT-tiny/16 for 224×224 (https://arxiv.org/abs/2012.12877): 5,717,416 parameters."""
deit_small: Preset = partial(deit_tiny, dim=384, heads=6)
"""DeiT-small/16 for 224×224 (https://arxiv.org/abs/2012.12877): 22,050,664 parameters."""
deit_base: Preset = partial(deit_tiny, dim=768, heads=12)
"""DeiT-base/16 for 224×224 (https://arxiv.org/abs/2012.12877): 86,567,656 parameters."""
vit_tiny_cifar: Preset = partial(deit_tiny, image_size=32, patch_size=4, num_classes=100)
"""DeiT-tiny's body on 32×32 images in 4×4 patches, 100 classes."""
vit_tiny_plus: Preset = partial(vit_tiny_cifar, mitigation="eigen:positive")
"""ViT-Ti⁺: `vit_tiny_cifar` with H = V ψ² Vᵀ, V by QR, which smooths (https://arxiv.org/abs/2401.04301)."""
vit_tiny_minus: Preset = partial(vit_tiny_cifar, mitigation="eigen:negative")
"""ViT-Ti⁻: `vit_tiny_cifar` with H = −V ψ² Vᵀ, V by QR, which sharpens (https://arxiv.org/abs/2401.04301).

QR is the paper's, and the slowest basis on a GPU. Faster ones reach the same H: `eigen:negative,basis=polar` with CUDA
graphs, `eigen:negative,basis=householder` without.
"""
vit_digits: Preset = partial(ViT, image_size=8, patch_size=2, in_chans=1, dim=48, depth=12, heads=3, num_classes=10)
"""A ViT for the embedded 8×8 digits in 2×2 patches: 16 patches and a class token."""
