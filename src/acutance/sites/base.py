"""An attention layer of some library's model, seen the same way for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.errors import TOKENS_REMAIN as TOKENS_REMAIN
from acutance.errors import AcutanceError, NoSitesError
from acutance.mitigations import LayerShape, Mitigation, UnknownShape

if TYPE_CHECKING:
    from acutance.mitigations.projection import Projection, Projections
    from acutance.sites.structure import Layer


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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of layer {self.layer}: {self.name}, {self.heads} heads of {self.head_dim}>"

    @property
    @abstractmethod
    def mitigation(self) -> Mitigation | None:
        """What is installed here now."""

    @abstractmethod
    def projections(self) -> Projections:
        """Where W_Q, W_K, W_V and W_proj are; asked for by `explain` and by mitigations of the weights alone."""

    def value_weight(self) -> Tensor:
        """W_V as (kv_heads · head_dim, dim)."""
        return self.projections().value.matrix()

    def projection_weight(self) -> Tensor:
        """W_proj as (dim, heads · head_dim)."""
        return self.projections().output.matrix()

    def query_weight(self) -> Tensor:
        """W_Q as (heads · head_dim, dim)."""
        return self._known("W_Q", self.projections().query).matrix()

    def key_weight(self) -> Tensor:
        """W_K as (kv_heads · head_dim, dim)."""
        return self._known("W_K", self.projections().key).matrix()

    def value_bias(self) -> Tensor | None:
        """What is added to the values, (kv_heads · head_dim,); None where nothing is."""
        return self.projections().value.offset()

    def projection_bias(self) -> Tensor | None:
        """What is added after W_proj, (dim,), to be changed in place; None where nothing is."""
        return self.projections().output.offset()

    def _known(self, what: str, projection: Projection | None) -> Projection:
        if projection is None:
            raise AcutanceError(f"{self.name}: {type(self.attention).__name__} keeps {what} under an unknown name")
        return projection

    def pre_norm(self) -> nn.Module | None:
        """The norm between the residual stream and the attention; None where there is none."""
        return None

    def pre_norm_gain(self) -> Tensor | None:
        """What the pre-norm multiplies each channel (dim,) by; None without a pre-norm, or where it has no gain."""
        gain = getattr(self.pre_norm(), "weight", None)
        return gain if isinstance(gain, Tensor) else None

    def between(self) -> str | None:
        """What the attention's output goes through before W_proj, such as a norm or a gate, which no H has."""
        return None

    def post_norm(self) -> nn.Module | None:
        """A norm between the output projection and the residual sum, as in Gemma 2; None where there is none."""
        return None

    def branch_gain(self) -> Tensor | None:
        """The gain per channel (dim,) between projection and residual, such as LayerScale's; None without one."""
        return None

    def update(self, branch: Tensor) -> Tensor:
        """What is added to the residual stream where the branch puts out this."""
        gain, norm = self.branch_gain(), self.post_norm()
        branch = branch if norm is None else norm(branch)
        return branch if gain is None else gain * branch

    def tokens(self, x: Tensor) -> Tensor:
        """What goes through the block, as (batch, tokens, dim); a grid of tokens is read row by row."""
        if x.ndim == 4 and x.shape[-1] == self.dim:
            return x.flatten(1, 2)
        if x.ndim == 4 and x.shape[1] == self.dim:
            return x.flatten(2).transpose(1, 2)
        return x

    @abstractmethod
    def observe(self, fn: Callable[[AttentionCall], None]) -> Undo:
        """Call `fn` with every record this attention makes, until the returned handle is removed."""

    @abstractmethod
    def install(self, mitigation: Mitigation) -> Callable[[], None]:
        """Put in a mitigation built for this layer; the returned function takes it out again."""

    @abstractmethod
    def replace(self, mitigation: Mitigation | None) -> None:
        """Exchange the installed mitigation for another one that leaves the weights alone, or for none."""

    def parametrise(self, mitigation: Mitigation) -> Callable[[], None]:
        """Let it make W_V and W_proj, if it does; the returned function undoes that."""
        if not mitigation.overrides("parametrise"):
            return lambda: None
        if "nothing_between" in mitigation.requires and (between := self.between()) is not None:
            raise AcutanceError(
                f"{mitigation.spec} cannot be used in {self.name}: {between} stands between attention and W_proj, so "
                "the two are no one matrix H"
            )
        projections = self.projections()
        mitigation.parametrise(projections.value, projections.output)
        return lambda: mitigation.unparametrise(projections.value, projections.output)

    def shape(self, *, pretrained: bool = False) -> LayerShape:
        """What a mitigation is told about this layer."""
        try:
            return LayerShape(self.layer, self.dim, self.heads, self.head_dim, self.kv_heads, pretrained)
        except NoSitesError as error:
            return UnknownShape(self.layer, pretrained, str(error))


class Undo:
    """A change that can be taken back, once, by `remove()` or by leaving a with block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Take the change back; once that is done, a second call does nothing."""
        if self._undo is not None:
            self._undo()
        self._undo = None

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
    layers: Callable[[nn.Module], list[Layer]] | None = None  # the same as `sites`, told by modules alone
    suffix_tokens: Callable[[nn.Module], int] = lambda model: 0  # behind the content, such as YOLOS' detection tokens
    reading: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()  # around a reading
    is_watched: Callable[[nn.Module], bool] = lambda model: False  # whether its blocks may be no residual stream
    remember: Callable[[], None] = lambda: None  # see to it that the library saves what its models carry
