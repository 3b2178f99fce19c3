"""Acutance's own models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError, SeveralStacksError
from acutance.mitigations import Mitigation
from acutance.mitigations.projection import Projections
from acutance.models.block import Attention, Block, LayerScale
from acutance.models.stack import BlockStack
from acutance.sites.base import AttentionSite, Library, Undo
from acutance.sites.structure import modules_of


class BlockSite(AttentionSite):
    """The attention of one reference block."""

    block: Block
    attention: Attention

    def __init__(self, block: Block, layer: int, name: str) -> None:
        self.layer, self.name, self.block, self.attention = layer, name, block, block.attn
        self.heads = self.kv_heads = block.attn.heads
        self.head_dim = block.attn.head_dim
        self.dim = self.heads * self.head_dim

    @property
    def mitigation(self) -> Mitigation | None:
        """What is installed here now."""
        installed = self.attention.mitigation
        return None if type(installed) is Mitigation else installed

    def projections(self) -> Projections:
        """Rows of the joint projection; in symmetric attention keys and queries share theirs."""
        return Projections(*self.attention.projections())

    def pre_norm(self) -> nn.Module | None:
        """norm1, unless it stands after the residual sum."""
        return None if self.block.post_norm else self.block.norm1

    def branch_gain(self) -> Tensor | None:
        """LayerScale's, if the model has it."""
        scale = self.block.ls1
        return scale.gamma if isinstance(scale, LayerScale) else None

    def observe(self, fn: Callable[[AttentionCall], None]) -> Undo:
        """One observer at a time."""
        if self.attention.observer is not None:
            raise AcutanceError(f"{self.name} is being observed already: remove the other observer first")
        self.attention.observer = fn
        return Undo(partial(setattr, self.attention, "observer", None))

    def install(self, mitigation: Mitigation) -> Callable[[], None]:
        """In place of the identity."""
        if self.mitigation is not None:
            raise AcutanceError(f"{self.name} carries {self.mitigation.spec!r} already: take it out first")
        self.attention.install(mitigation)
        return self.attention.uninstall

    def replace(self, mitigation: Mitigation | None) -> None:
        """The identity is there where there is none."""
        self.attention.mitigation = Mitigation() if mitigation is None else mitigation


def _only_stack(model: nn.Module) -> tuple[str, BlockStack] | None:
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


def _sites(model: nn.Module) -> list[AttentionSite]:
    found = _only_stack(model)
    if found is None:
        return []
    name, stack = found
    prefix = f"{name}." if name else ""
    found_blocks = stack.named_blocks()  # blocks may sit inside wrappers, such as checkpointing's
    return [BlockSite(block, i, f"{prefix}blocks.{path}.attn") for i, (path, block) in enumerate(found_blocks, 1)]


def _stack(model: nn.Module) -> BlockStack:
    found = _only_stack(model)
    assert found is not None, "asked only after sites were found"
    return found[1]


LIBRARY = Library(
    name="acutance.models",
    sites=_sites,
    prefix_tokens=lambda model: _stack(model).prefix_tokens,
    final_norm=lambda model: _stack(model).final_norm,
    suffix_tokens=lambda model: _stack(model).suffix_tokens,
)
