"""Acutance's own models."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from acutance.attention.attend import Observer
from acutance.errors import AcutanceError
from acutance.mitigations import Mitigation
from acutance.mitigations.projection import Projections
from acutance.models.block import Attention, Block
from acutance.models.vit import BlockStack
from acutance.sites.site import AttentionSite, Library, Stages, Undo
from acutance.sites.structure import Layer, SpecialTokens, join, modules_of, several_stacks


class BlockSite(AttentionSite):
    """The attention of one reference block, which has places for a mitigation and an observer."""

    block: Block
    attention: Attention

    def __init__(self, _stack: Any, layer: Layer) -> None:
        self.layer, self.name, self.block, self.attention = layer[:4]  # type: ignore[assignment]
        self.heads = self.kv_heads = self.attention.heads
        self.head_dim = self.attention.head_dim
        self.dim = self.heads * self.head_dim

    @property
    def mitigation(self) -> Mitigation | None:
        installed = self.attention.mitigation
        return None if type(installed) is Mitigation else installed

    def replace(self, mitigation: Mitigation | None) -> None:
        placed = Mitigation() if mitigation is None else mitigation
        self.attention.mitigation = placed.train(self.attention.training)

    def observe(self, fn: Observer) -> Undo:
        if self.attention.observer is not None:
            raise AcutanceError(f"{self.name} is being observed already: remove the other observer first")
        self.attention.observer = fn
        return Undo(partial(setattr, self.attention, "observer", None))

    def projections(self) -> Projections:
        return self.attention.projections()

    def pre_norm(self) -> nn.Module | None:
        return None if self.block.post_norm else self.block.norm1

    def branch_gain(self) -> Tensor | None:
        return getattr(self.block.ls1, "gamma", None)

    def stages(self) -> Stages:
        return Stages(norms=(self.block.norm1, self.block.norm2) if self.block.post_norm else ())


def _stacks(model: nn.Module) -> list[tuple[str, BlockStack]]:
    """The stack inside any wrappers, if there is one; two would make layer numbers ambiguous."""
    found = [(name, module) for name, module in modules_of(model).items() if isinstance(module, BlockStack)]
    if len(found) > 1:
        raise several_stacks(model, [name for name, _ in found])
    return found


def _layers(model: nn.Module) -> list[Layer]:
    return [
        Layer(layer, join(stack, f"blocks.{path}.attn"), block, block.attn)
        for stack, found in _stacks(model)
        for layer, (path, block) in enumerate(found.named_blocks(), 1)  # inside wrappers, such as checkpointing's
    ]


def _special_tokens(model: nn.Module) -> SpecialTokens:
    ((_, stack),) = _stacks(model)
    return SpecialTokens(stack.prefix_tokens, stack.suffix_tokens)


LIBRARY = Library(
    name="acutance.models",
    generality=1,  # after transformers, whose models are asked for most
    layers=_layers,
    site=BlockSite,
    final_norm=lambda model: (stack := _stacks(model)[0][1]).get_submodule(stack.final_norm),
    special_tokens=_special_tokens,
)
