"""Acutance's own models."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from acutance.errors import AcutanceError, SeveralStacksError
from acutance.mitigations import Mitigation
from acutance.mitigations.projection import Projections
from acutance.models.block import Attention, Block, LayerScale
from acutance.models.vit import BlockStack
from acutance.sites.site import AttentionSite, Library, Observer, Undo
from acutance.sites.structure import Layer, SpecialTokens, modules_of


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
        self.attention.mitigation = Mitigation() if mitigation is None else mitigation

    def observe(self, fn: Observer) -> Undo:
        if self.attention.observer is not None:
            raise AcutanceError(f"{self.name} is being observed already: remove the other observer first")
        self.attention.observer = fn
        return Undo(partial(setattr, self.attention, "observer", None))

    def projections(self) -> Projections:
        return Projections(*self.attention.projections())

    def pre_norm(self) -> nn.Module | None:
        return None if self.block.post_norm else self.block.norm1

    def branch_gain(self) -> Tensor | None:
        scale = self.block.ls1
        return scale.gamma if isinstance(scale, LayerScale) else None


def _stack(model: nn.Module) -> tuple[str, BlockStack] | None:
    """The stack inside any wrappers; two of them would make layer numbers ambiguous."""
    found = [(name, module) for name, module in modules_of(model).items() if isinstance(module, BlockStack)]
    if len(found) > 1:
        names, kinds = [name for name, _ in found], {type(stack).__name__ for _, stack in found}
        what = f"several {kinds.pop()}s" if len(kinds) == 1 else "several stacks of layers"
        raise SeveralStacksError(
            f"{type(model).__name__} holds {what} ({', '.join(names)}): pass one of them, or name it with part=, "
            f"e.g. part={names[0]!r}",
            names,
        )
    return found[0] if found else None


def _layers(model: nn.Module) -> list[Layer]:
    found = _stack(model)
    if found is None:
        return []
    prefix = f"{found[0]}." if found[0] else ""
    blocks = found[1].named_blocks()  # which may sit inside wrappers, such as checkpointing's
    return [Layer(i, f"{prefix}blocks.{path}.attn", block, block.attn) for i, (path, block) in enumerate(blocks, 1)]


def _known(model: nn.Module) -> BlockStack:
    found = _stack(model)
    assert found is not None, "asked only after layers were found"
    return found[1]


LIBRARY = Library(
    name="acutance.models",
    generality=1,  # after transformers, whose models are asked for most
    layers=_layers,
    site=BlockSite,
    final_norm=lambda model: _known(model).final_norm,
    special_tokens=lambda model: SpecialTokens(_known(model).prefix_tokens, _known(model).suffix_tokens),
)
