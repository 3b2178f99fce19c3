"""An attention layer of any library's model, seen the same way for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from acutance.attention.attend import Observer
from acutance.errors import AcutanceError, NoSitesError
from acutance.mitigations.base import LayerShape, Mitigation, UnknownShape
from acutance.mitigations.projection import Projection, Projections
from acutance.sites.structure import Layer, SpecialTokens, grid_as_tokens, tokens_by_name


class Undo:
    """A change that can be taken back, once, by `remove()` or by leaving a with block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Take the change back; a second call does nothing."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Stages(NamedTuple):
    """How the parts of a block follow one another, its attention first."""

    rest: str = "mlp"  # what else adds to the stream; "rest" if that is not one branch
    parallel: bool = False  # whether it does not read what the attention added
    norms: tuple[nn.Module, ...] = ()  # on the stream itself, as in Post-LN: after the attention's sum and the other


class AttentionSite(ABC):
    """Where one layer's attention lives: the only thing that knows a library's internals."""

    layer: int
    name: str
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

    @abstractmethod
    def observe(self, fn: Observer) -> Undo:
        """Call `fn` with every `AttentionCall` of this layer, until the returned handle is removed."""

    @abstractmethod
    def replace(self, mitigation: Mitigation | None) -> None:
        """Exchange the installed mitigation for another one that leaves the weights alone, or for none."""

    def value_weight(self) -> Tensor:
        """W_V as (kv_heads · head_dim, dim)."""
        return self.projections().value.matrix()

    def projection_weight(self) -> Tensor:
        """W_proj as (dim, heads · head_dim)."""
        return self.projections().output.matrix()

    def query_weight(self) -> Tensor:
        """W_Q as (heads · head_dim, dim)."""
        return self._matrix("W_Q", self.projections().query)

    def key_weight(self) -> Tensor:
        """W_K as (kv_heads · head_dim, dim)."""
        return self._matrix("W_K", self.projections().key)

    def _matrix(self, what: str, projection: Projection | None) -> Tensor:
        if projection is None:
            raise AcutanceError(f"{self.name}: {type(self.attention).__name__} keeps {what} under an unknown name")
        return projection.matrix()

    def pre_norm(self) -> nn.Module | None:
        """The norm between the residual stream and the attention."""
        return None

    def pre_norm_gain(self) -> Tensor | None:
        """What the pre-norm multiplies each channel (dim,) by."""
        gain = getattr(self.pre_norm(), "weight", None)
        return gain if isinstance(gain, Tensor) else None

    def between(self) -> str | None:
        """What stands between attention and W_proj, such as a norm or a gate, which no H has."""
        return None

    def post_norm(self) -> nn.Module | None:
        """A norm between the output projection and the residual sum, as in Gemma 2."""
        return None

    def branch_gain(self) -> Tensor | None:
        """The gain per channel (dim,) between projection and residual sum, such as LayerScale's."""
        return None

    def update(self, branch: Tensor) -> Tensor:
        """What is added to the residual stream, given the branch's output."""
        gain, norm = self.branch_gain(), self.post_norm()
        branch = branch if norm is None else norm(branch)
        return branch if gain is None else gain * branch

    def stages(self) -> Stages | None:
        """How the parts of the block follow one another; None where that is not known."""
        return None

    def tokens(self, x: Tensor) -> Tensor:
        """What goes through the block, as (batch, tokens, dim); a grid of tokens is read row by row."""
        return grid_as_tokens(self.block, x)

    def like(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Tokens (batch, tokens, dim) in the layout of x, from which `tokens` makes them."""
        return tokens.reshape(x.shape)

    def refuse(self, mitigation: Mitigation) -> None:
        """Raise where this layer does not have what the mitigation requires."""
        reason = self.between() if "nothing_between" in mitigation.requires else None
        if reason is not None:
            raise AcutanceError(
                f"{mitigation.spec} cannot be used in {self.name}: {reason} stands between attention and W_proj"
            )

    def install(self, mitigation: Mitigation) -> None:
        """Put in a mitigation built for this layer, or leave the layer as it was."""
        if self.mitigation is not None:
            raise AcutanceError(f"{self.name} carries {self.mitigation.spec!r} already: take it out first")
        self.refuse(mitigation)
        weights = self.projections()[2:] if mitigation.overrides("parametrise") else None
        self.replace(mitigation)
        if weights is not None:
            try:
                mitigation.parametrise(*weights)
            except BaseException:
                self.uninstall()
                raise

    def uninstall(self) -> None:
        """Take it out again."""
        if self.mitigation is not None:
            if self.mitigation.overrides("parametrise"):
                self.mitigation.unparametrise(*self.projections()[2:])
            self.replace(None)

    def shape(self, *, pretrained: bool = False) -> LayerShape:
        """What a mitigation is told about this layer."""
        try:
            return LayerShape(self.layer, self.dim, self.heads, self.head_dim, self.kv_heads, pretrained)
        except NoSitesError as error:
            return UnknownShape(self.layer, pretrained, str(error))


@dataclass(frozen=True)
class Library:
    """One family of models; supporting another is one file that makes one of these."""

    name: str  # as error messages list it
    layers: Callable[[nn.Module], list[Layer]]  # in depth order, by modules alone; empty for another library's model
    site: Callable[[Any, Layer], AttentionSite]  # made with the `Stack` of the layers
    final_norm: Callable[[nn.Module], nn.Module] | None = None  # by its name, if nobody knows better
    # Before and after the content; by the names of their parameters, if nobody knows better.
    special_tokens: Callable[[nn.Module], SpecialTokens] = lambda model: tokens_by_name(model.named_parameters())
    reading: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()  # around a reading
    generality: int = 0  # libraries that know models by their parts are asked after those that know their own models
    is_watched: Callable[[nn.Module], bool] = lambda model: False  # whether its blocks may be no residual stream
