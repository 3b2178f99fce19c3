"""One `nn.MultiheadAttention` as an attention site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.mitigations.projection import Projection, Projections
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.discovery import Surroundings, discover, is_norm
from acutance.sites.patched import PatchedSite, Stack
from acutance.sites.structure import name_one, tokens_in
from acutance.sites.torch_nn_forward import forward

TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class MultiheadSite(PatchedSite):
    """One `nn.MultiheadAttention`, used as self-attention."""

    attention: nn.MultiheadAttention

    def __init__(
        self,
        stack: Stack,
        layer: int,
        name: str,
        block: nn.Module,
        attention: nn.MultiheadAttention,
        *,
        stage: str,
        encoder: nn.TransformerEncoder | None,
    ) -> None:
        super().__init__(stack, layer, name, block, attention)
        self.dim, self.heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.kv_heads = self.heads
        self.stage = stage  # path of the container that holds the block
        self.encoder = encoder  # which would turn padded batches into nested tensors

    def projections(self) -> Projections:
        """Thirds of a joint weight, or three of their own; their biases are joint either way."""
        separate = not self.attention._qkv_same_embed_dim
        rows = [slice(place * self.dim, (place + 1) * self.dim) for place in range(3)]
        q, k, v = (
            Projection(
                self.attention,
                None if separate else rows[place],
                weight=f"{letter}_proj_weight" if separate else "in_proj_weight",
                bias="in_proj_bias",
                bias_rows=rows[place],
            )
            for place, letter in enumerate("qkv")
        )
        return Projections(q, k, v, Projection(self.attention.out_proj))

    def value_weight(self) -> Tensor:
        """W_V, which may read other channels than the residual stream's."""
        weight = super().value_weight()
        if weight.shape[1] != self.dim:
            shape = tuple(weight.shape)
            raise AcutanceError(f"{self.name}.v_proj_weight {shape} does not read the {self.dim} channels")
        return weight

    @cached_property
    def surroundings(self) -> Surroundings:
        """What somebody's block does around the attention."""
        return discover(self.block, self.attention, None, self.dim, self.dim)

    def pre_norm(self) -> nn.Module | None:
        """`norm1` of torch's layers if `norm_first`; in other blocks the norm whose output enters the attention."""
        if isinstance(self.block, TORCH_LAYERS):
            return self.block.norm1 if self.block.norm_first else None
        source = self.surroundings.source
        if source is None and any(is_norm(module) for module in self.block.modules()):
            raise AcutanceError(
                f"{self.name}: {type(self.block).__name__} does not run on random tokens, so which of its norms comes "
                "before the attention is not known: describe the model in a Library of its own"
            )
        return None if source is self.block else source

    def branch_gain(self) -> Tensor | None:
        """A parameter of the block that multiplies the attention's output; torch's own layers have none."""
        gain = None if isinstance(self.block, TORCH_LAYERS) else self.surroundings.gain
        return self.projection_weight().new_full((self.dim,), gain) if isinstance(gain, (int, float)) else gain

    def post_norm(self) -> nn.Module | None:
        """A norm of the attention branch in somebody's block."""
        return None if isinstance(self.block, TORCH_LAYERS) else self.surroundings.post_norm

    def tokens(self, x: Tensor) -> Tensor:
        """What goes through the block as (batch, tokens, dim), also where it is (tokens, batch, dim) or one sample."""
        if x.ndim == 2:
            return x[None]
        return x.transpose(0, 1) if x.ndim == 3 and not self.block_is_batch_first() else super().tokens(x)

    def block_is_batch_first(self) -> bool:
        """Whether the block is given (batch, tokens, dim), whatever its attention takes."""
        batch_first: bool = self.attention.batch_first
        if isinstance(self.block, TORCH_LAYERS):
            return batch_first
        swaps = self.surroundings.is_swapped
        if swaps is None and not batch_first:
            raise AcutanceError(
                f"{self.name} takes (tokens, batch, dim), but whether {type(self.block).__name__} does cannot be told "
                "from its forward: use batch_first=True, or describe the model in a Library of its own"
            )
        return batch_first != bool(swaps)

    def route(self) -> Callable[[], None]:
        """A forward of our own, where no mode can look; hooks on the block alone switch off torch's fast path."""
        attention = self.attention
        if type(attention).forward is not nn.MultiheadAttention.forward or "forward" in vars(attention):
            raise AcutanceError(f"{self.name} ({type(attention).__name__}) has a forward of its own, unknown to us")
        if attention.bias_k is not None or attention.add_zero_attn:
            raise AcutanceError(
                f"{self.name} attends to a key that is no token (add_bias_kv or add_zero_attn), so its A is not "
                f"square. {TOKENS_REMAIN}"
            )
        nested = getattr(self.encoder, "use_nested_tensor", None)
        if self.encoder is not None:
            self.encoder.use_nested_tensor = False
        return partial(_unroute, super().route(), self.encoder, nested)

    def _run(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return forward(self, *args, **kwargs)

    def refuse_first_values(self) -> str | None:
        """Whether stages follow one another, on the same tokens, does not show in a model's structure."""
        stages = list(dict.fromkeys(site.stage for site in self.stack.sites if isinstance(site, MultiheadSite)))
        if len(stages) == 1:
            return None
        return (
            f"its layers are in several stages ({', '.join(stages)}), which need not share their tokens: "
            f"{name_one(stages[0])}"
        )

    def pass_through(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Cross-attention in this forward pass: nothing of ours."""
        if self.mitigation is not None:
            query, key = (tuple(x.shape) for x in args[:2])
            raise AcutanceError(
                f"{self.name} is called as cross-attention (query {query} and key {key} are not the same tensor), "
                f"which {self.mitigation.spec} is not made for: leave layer {self.layer} out, or pass one tensor as "
                "both if it is self-attention"
            )
        self.now(args[0]).attended += 1
        return nn.MultiheadAttention.forward(self.attention, *args, **options)

    def _enter_block(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        x = tokens_in(args, kwargs)
        if x.is_nested:
            raise AcutanceError(f"the block of {self.name} was given a nested tensor: pass a padded one and a mask")
        super()._enter_block(block, args, kwargs)


def _unroute(unroute: Callable[[], None], encoder: nn.TransformerEncoder | None, nested: bool | None) -> None:
    unroute()
    if encoder is not None and nested is not None:
        encoder.use_nested_tensor = nested
