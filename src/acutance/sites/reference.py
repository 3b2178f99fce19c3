"""Acutance's own models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.mitigations import Mitigation
from acutance.models.vit import Attention, Block, ViT
from acutance.operator import AttentionRecord
from acutance.sites.base import AttentionSite, Library, Undo


class BlockSite(AttentionSite):
    """The attention of one reference block."""

    attention: Attention

    def __init__(self, block: Block, layer: int, name: str) -> None:
        self.layer, self.name, self.block, self.attention = layer, name, block, block.attn
        self.heads = self.kv_heads = block.attn.heads
        self.head_dim = block.attn.head_dim
        self.dim = block.attn.proj.out_features

    @property
    def mitigation(self) -> Mitigation | None:
        """What is installed here now."""
        installed = self.attention.mitigation
        return None if type(installed) is Mitigation else installed

    def value_weight(self) -> Tensor:
        """The last `dim` rows of the joint projection."""
        return self.attention.value_projection.weight[-self.dim :]

    def projection_weight(self) -> Tensor:
        """W_proj."""
        return self.attention.proj.weight

    def observe(self, fn: Callable[[AttentionRecord], None]) -> Undo:
        """One observer at a time."""
        if self.attention.observer is not None:
            raise AcutanceError(f"{self.name} is being observed already: remove the other observer first")
        self.attention.observer = fn
        return Undo(partial(setattr, self.attention, "observer", None))

    def install(self, mitigation: Mitigation) -> Callable[[], None]:
        """Swap the attention's mitigation."""
        if self.mitigation is not None:
            raise AcutanceError(f"{self.name} carries {self.mitigation.spec!r} already: take it out first")
        mitigation.parametrise(self)
        identity, self.attention.mitigation = self.attention.mitigation, mitigation

        def undo() -> None:
            self.attention.mitigation = identity
            mitigation.unparametrise(self)

        return undo


def block_sites(vit: ViT, prefix: str = "") -> list[BlockSite]:
    """The sites of one ViT, first block first; blocks may sit inside wrappers, such as checkpointing's."""
    blocks = [(name, module) for name, module in vit.blocks.named_modules() if isinstance(module, Block)]
    return [BlockSite(block, i, f"{prefix}blocks.{name}.attn") for i, (name, block) in enumerate(blocks, 1)]


def _only_vit(model: nn.Module) -> tuple[str, ViT] | None:
    """The ViT inside any wrappers; two of them would make layer numbers ambiguous."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ViT)]
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise AcutanceError(f"{type(model).__name__} holds several ViTs ({names}): pass one of them")
    return found[0] if found else None


def _sites(model: nn.Module) -> list[AttentionSite]:
    found = _only_vit(model)
    if found is None:
        return []
    name, vit = found
    return list(block_sites(vit, f"{name}." if name else ""))


def _vit(model: nn.Module) -> ViT:
    found = _only_vit(model)
    assert found is not None, "asked only after sites were found"
    return found[1]


LIBRARY = Library(
    name="acutance.models",
    sites=_sites,
    prefix_tokens=lambda model: _vit(model).prefix_tokens,
    final_norm=lambda model: _vit(model).norm,
)
