"""Models made of `nn.MultiheadAttention`: torch's own Transformer layers, and anybody's blocks that hold one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import dropwhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from acutance.errors import TOKENS_REMAIN, AcutanceError
from acutance.mitigations import LayerShape
from acutance.mitigations.projection import Projection, Projections
from acutance.sites import find, structure
from acutance.sites.discovery import is_norm
from acutance.sites.forward_pass import ForwardPass
from acutance.sites.named import NamedSite
from acutance.sites.site import Library, Undo
from acutance.sites.structure import Layer, modules_of


class MultiheadSite(NamedSite):
    """One `nn.MultiheadAttention`, used as self-attention."""

    attention: nn.MultiheadAttention

    @cached_property
    def _found(self) -> tuple[Projections, LayerShape]:
        """Thirds of a joint weight, or three of their own; their biases are joint either way."""
        mha, dim, joint = self.attention, self.attention.embed_dim, self.attention._qkv_same_embed_dim
        thirds = {letter: slice(place * dim, (place + 1) * dim) for place, letter in enumerate("qkv")}
        names = {letter: "in_proj_weight" if joint else f"{letter}_proj_weight" for letter in thirds}
        q, k, v = (
            Projection(mha, rows if joint else None, names[letter], (mha, "in_proj_bias", rows))
            for letter, rows in thirds.items()
        )
        shape = LayerShape(self.layer, dim, mha.num_heads, mha.head_dim, mha.num_heads)
        return Projections(q, k, v, Projection(mha.out_proj)), shape

    def value_weight(self) -> Tensor:
        """W_V, which may read other channels than the residual stream's."""
        weight = super().value_weight()
        if weight.shape[1] != self.dim:
            shape = tuple(weight.shape)
            raise AcutanceError(f"{self.name}.v_proj_weight {shape} does not read the {self.dim} channels")
        return weight

    def output_projection(self) -> nn.Module | None:
        return None  # it is applied in our forward

    def tokens(self, x: Tensor) -> Tensor:
        """What goes through the block as (batch, tokens, dim), also where it is (tokens, batch, dim) or one sample."""
        if x.ndim == 2:
            return x[None]
        return x.transpose(0, 1) if x.ndim == 3 and not self.block_is_batch_first() else super().tokens(x)

    def like(self, tokens: Tensor, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return tokens[0]
        return tokens.transpose(0, 1) if x.ndim == 3 and not self.block_is_batch_first() else super().like(tokens, x)

    def block_is_batch_first(self) -> bool:
        """Whether the block is given (batch, tokens, dim), whatever its attention takes."""
        batch_first: bool = self.attention.batch_first
        if isinstance(self.block, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            return batch_first  # without a run of the block, which would reshard it within a forward pass
        swaps = self.surroundings.is_swapped
        if swaps is None and not batch_first:
            raise AcutanceError(
                f"{self.name} takes (tokens, batch, dim), but whether {type(self.block).__name__} does cannot be told "
                "from its forward: use batch_first=True, or describe the model in a Library of its own"
            )
        return batch_first != bool(swaps)

    def route(self) -> None:
        """Intercepted: hooks on the block switch off its fast path, whoever intercepts switches off the attention's."""
        if self.attention.bias_k is not None or self.attention.add_zero_attn:
            raise AcutanceError(
                f"{self.name} attends to a key that is no token (add_bias_kv or add_zero_attn). {TOKENS_REMAIN}"
            )
        super().route()
        for encoder in self.stack.root.modules():
            if getattr(encoder, "use_nested_tensor", False):  # it would make nested tensors of padded batches
                vars(encoder)["use_nested_tensor"] = False
                self.stack.hooks.append(Undo(partial(setattr, encoder, "use_nested_tensor", True)))

    def now(self, x: Tensor) -> ForwardPass:
        now = super().now(x)
        now.entering = self._batched(x)
        return now

    def finish(self, y: Tensor, now: ForwardPass) -> Tensor:
        done = super().finish(self._batched(y), now)
        return done[0] if y.ndim == 2 else done if self.attention.batch_first else done.transpose(0, 1)

    def _batched(self, x: Tensor) -> Tensor:
        """What the attention is given or returns, as (batch, tokens, dim)."""
        return x[None] if x.ndim == 2 else x if self.attention.batch_first else x.transpose(0, 1)

    def _run(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key: Tensor = kwargs["key"] if "key" in kwargs else args[1]
        # Tensors of one content count too, but cannot be compared when compiling.
        if x is key or (x.shape == key.shape and not torch.compiler.is_compiling() and torch.equal(x, key)):
            return super()._run(x, args, kwargs)
        if self.mitigation is not None:
            raise AcutanceError(
                f"{self.name} is called as cross-attention (query {tuple(x.shape)}, key {tuple(key.shape)}), which "
                f"{self.mitigation.spec} is not made for: leave layer {self.layer} out, or pass one tensor as both"
            )
        self.now(x).attended += 1
        return nn.MultiheadAttention.forward(self.attention, *args, **kwargs)


def _layers(model: nn.Module) -> list[Layer]:
    found = {path: m for path, m in modules_of(model).items() if isinstance(m, nn.MultiheadAttention)}
    return structure.layers_in(model, found)


def _final_norm(model: nn.Module) -> nn.Module:
    """By the order of definition: anybody's names say nothing."""
    last = cast(MultiheadSite, find(model)[-1])

    def choose(holder: nn.Module, blocks: str) -> nn.Module | None:
        if not last.block_is_batch_first() and not isinstance(holder, (nn.TransformerEncoder, nn.TransformerDecoder)):
            return None  # whether its norm is given (tokens, batch, dim) too is not known
        later = dropwhile(lambda child: child[0] != blocks, holder.named_children())
        return next((module for _, module in later if is_norm(module)), None)

    return structure.norm_after(model, last.attention, choose)


@contextmanager
def _without_fast_path(_model: nn.Module) -> Iterator[None]:
    """Read without hooks on the attention too, blocks must not hand nested tensors to one another."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


LIBRARY = Library(
    name="torch.nn",
    generality=2,
    layers=_layers,
    site=MultiheadSite,
    final_norm=_final_norm,
    reading=_without_fast_path,
)
