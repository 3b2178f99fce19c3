"""One `nn.MultiheadAttention` as an attention site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, ShapeError
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.blocks import name_one, path_of
from acutance.sites.patched import PatchedSite, Stack, averages, tokens_in
from acutance.sites.torch_nn_forward import forward
from acutance.sites.traced import Surroundings, is_norm, surroundings

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
        self._came_in: torch.Size | None = None  # the shape of what entered the block

    def query_weight(self) -> Tensor:
        """W_Q, the first rows of the joint weight or a weight of its own."""
        return self._projection("q_proj_weight", 0)

    def key_weight(self) -> Tensor:
        """W_K."""
        return self._projection("k_proj_weight", 1)

    def value_weight(self) -> Tensor:
        """W_V."""
        return self._projection("v_proj_weight", 2)

    def value_bias(self) -> Tensor | None:
        """The last third of the joint bias."""
        bias = self.attention.in_proj_bias
        return None if bias is None else bias[2 * self.dim :]

    def projection_weight(self) -> Tensor:
        """W_proj."""
        return self.attention.out_proj.weight

    def projection_bias(self) -> Tensor | None:
        """The bias of the output projection."""
        return self.attention.out_proj.bias

    @cached_property
    def surroundings(self) -> Surroundings | None:
        """What stands around the attention in the block; None where the block cannot be traced."""
        return surroundings(self.block, path_of(self.block, self.attention))

    def pre_norm(self) -> nn.Module | None:
        """`norm1` of torch's layers if `norm_first`; in other blocks what tracing finds before the attention."""
        if isinstance(self.block, TORCH_LAYERS):
            return self.block.norm1 if self.block.norm_first else None
        around = self.surroundings
        if around is None and any(is_norm(module) for module in self.block.modules()):
            raise AcutanceError(
                f"{self.name}: {type(self.block).__name__}.forward cannot be traced, so which of its norms stands "
                "before the attention is not known: describe the model in a Library of its own"
            )
        return None if around is None else around.pre_norm

    def branch_gain(self) -> Tensor | None:
        """A parameter of the block that multiplies the attention's output; torch's own layers have none."""
        around = None if isinstance(self.block, TORCH_LAYERS) else self.surroundings
        return None if around is None else around.gain

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
        around = self.surroundings
        swaps = None if around is None else around.swaps
        if swaps is None and not batch_first:
            raise AcutanceError(
                f"{self.name} takes (tokens, batch, dim), but whether {type(self.block).__name__} does cannot be told "
                "from its forward: use batch_first=True, or describe the model in a Library of its own"
            )
        return batch_first != bool(swaps)

    def divert(self) -> Callable[[], None]:
        """Give the module a forward of ours; hooks on its block alone switch off the fast path of torch's layers."""
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
        attention.forward = partial(forward, self)  # type: ignore[method-assign]
        return partial(_undivert, attention, self.encoder, nested)

    def refuse_first_values(self) -> str | None:
        """Whether stages follow one another, on the same tokens, does not show in a model's structure."""
        stages = list(dict.fromkeys(site.stage for site in self.stack.sites if isinstance(site, MultiheadSite)))
        if len(stages) == 1:
            return None
        return (
            f"its layers are in several stages ({', '.join(stages)}), which need not share their tokens: "
            f"{name_one(stages[0])}"
        )

    def check_tokens(self, v: Tensor) -> None:
        """Refuse v⁰ of other tokens than v's, and means over part of them: merged tokens, windows cut in the block."""
        mitigation, first, shape = self.mitigation, self.stack.stream.peek(), self._came_in
        if mitigation is None:
            return
        needs_first = mitigation.needs_first_values
        if needs_first and first is not None and self.layer > 1 and first.shape != v.shape:
            raise ShapeError(
                f"{self.name}: the values {tuple(v.shape)} are not of the shape of the first layer's "
                f"{tuple(first.shape)}, so {mitigation.spec} cannot compare them: mitigate the layers of one stage"
            )
        if shape is None or len(shape) < 3 or not (needs_first or averages(mitigation)):
            return
        if v.shape[0] not in shape[: 2 if len(shape) == 3 else 1]:
            raise ShapeError(
                f"{self.name}: the block was given {tuple(shape)} and rearranges it for its attention into a batch of "
                f"{v.shape[0]}, perhaps windows, so v⁰ or a mean may be of other tokens: {mitigation.spec} needs a "
                "Library of its own for this model"
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
        self.ran = True
        return nn.MultiheadAttention.forward(self.attention, *args, **options)

    def enter(self, x: Tensor) -> None:
        """Keep what enters the branch, (batch, tokens, dim), for mitigations of the features."""
        if self.mitigation is not None and self.mitigation.changes_features:
            self._entered = x

    def _projection(self, separate: str, index: int) -> Tensor:
        joint = self.attention.in_proj_weight
        weight: Tensor = getattr(self.attention, separate) if joint is None else joint[index * self.dim :][: self.dim]
        if weight.shape[1] != self.dim:
            raise AcutanceError(f"{self.name}.{separate} {tuple(weight.shape)} does not read the {self.dim} channels")
        return weight

    def _enter_block(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        x = tokens_in(args, kwargs)
        if x.is_nested:
            raise AcutanceError(f"the block of {self.name} was given a nested tensor: pass a padded one and a mask")
        self._came_in = x.shape
        super()._enter_block(block, args, kwargs)


def _undivert(attention: nn.Module, encoder: nn.TransformerEncoder | None, nested: bool | None) -> None:
    vars(attention).pop("forward", None)
    if encoder is not None and nested is not None:
        encoder.use_nested_tensor = nested
