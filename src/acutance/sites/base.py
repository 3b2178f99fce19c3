"""An attention layer of some library's model, seen the same way for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from acutance.mitigations import LayerShape, Mitigation
from acutance.operator import AttentionRecord


class AttentionSite(ABC):
    """Where one layer's attention lives: the only thing that knows a library's internals."""

    layer: int  # depth; 1 is the first, as in the papers
    name: str  # path of the attention module inside the model
    block: nn.Module
    attention: nn.Module
    dim: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    @abstractmethod
    def mitigation(self) -> Mitigation | None:
        """What is installed here now."""

    @abstractmethod
    def value_weight(self) -> Tensor:
        """W_V as (kv_heads · head_dim, dim)."""

    @abstractmethod
    def projection_weight(self) -> Tensor:
        """W_proj as (dim, heads · head_dim)."""

    @abstractmethod
    def observe(self, fn: Callable[[AttentionRecord], None]) -> Undo:
        """Call `fn` with every record this attention makes, until the returned handle is removed."""

    @abstractmethod
    def install(self, mitigation: Mitigation) -> Callable[[], None]:
        """Put in a mitigation built for this layer; the returned function takes it out again."""

    def shape(self, *, pretrained: bool = False) -> LayerShape:
        """What a mitigation is told about this layer."""
        return LayerShape(self.layer, self.dim, self.heads, self.head_dim, self.kv_heads, pretrained)


class Undo:
    """A change that can be taken back, once, by `remove()` or by leaving a with block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Take the change back; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(frozen=True)
class Library:
    """One family of models; supporting another is one file that makes one of these."""

    name: str  # as error messages list it
    sites: Callable[[nn.Module], list[AttentionSite]]  # in depth order; empty for another library's model
    prefix_tokens: Callable[[nn.Module], int]
    final_norm: Callable[[nn.Module], nn.Module]
