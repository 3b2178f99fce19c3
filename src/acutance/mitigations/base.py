"""What a mitigation is: up to four hooks around an attention layer, each the identity unless overridden."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from acutance.errors import AcutanceError, ShapeError
from acutance.kernels.epilogue import Epilogue
from acutance.kernels.heads import repeat_heads

if TYPE_CHECKING:
    from acutance.operator import AttentionOperator

REGISTRY: dict[str, type[Mitigation]] = {}

Weights = tuple[Tensor, Tensor]  # W_V as (kv_heads · head_dim, dim) and W_proj as (dim, heads · head_dim)

_MitigationClass = TypeVar("_MitigationClass", bound="type[Mitigation]")


@dataclass(frozen=True)
class LayerShape:
    """What a mitigation may know about the layer it is built for."""

    layer: int  # depth; 1 is the first
    dim: int
    heads: int
    head_dim: int
    kv_heads: int  # fewer than heads under grouped queries
    pretrained: bool = False  # patched into a trained model: learnt parameters must start at the identity


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def register(name: str) -> Callable[[_MitigationClass], _MitigationClass]:
    """Make a class known to `parse` under `name`."""

    def decorate(cls: _MitigationClass) -> _MitigationClass:
        holder = REGISTRY.get(name, cls)
        if _path(holder) != _path(cls):  # by path: a notebook cell may be run again
            raise AcutanceError(f"the mitigation name {name!r} is taken by {holder.__name__}: choose another")
        REGISTRY[name] = cls
        cls.name = name
        return cls

    return decorate


@register("none")
class Mitigation(nn.Module):
    """The identity, and the base of every mitigation.

    A subclass overrides the hooks its paper needs. Its constructor takes options only and keeps each under
    its own name (that is what `spec` reads); parameters of a layer are made in `build`. Shapes: u, v and v0
    are (batch, heads, tokens, head_dim), v and v0 possibly of fewer heads; x and y are (batch, tokens, dim).
    """

    name: ClassVar[str] = ""
    positional: ClassVar[str | None] = None  # the option that stands without its key right after the colon
    ignores_first_values: ClassVar[bool] = False  # said by those that override `values` or `output` without using v0
    averages_tokens: ClassVar[bool] = False  # said by those whose `features` mix tokens, masked or not
    shape: LayerShape | None = None  # set once built for a layer
    distance: float | None = None  # ‖H − H₀‖/‖H₀‖ (‖H‖ if H₀ = 0) where it replaced the H₀ of a trained layer

    def build(self, shape: LayerShape) -> None:
        """Create the parameters of one layer."""

    def for_layer(self, shape: LayerShape) -> Self:
        """A fresh copy of this mitigation, built for one layer."""
        layer = copy.deepcopy(self)
        layer.shape = shape
        layer.build(shape)
        return layer

    def parametrise(self, site: Any) -> None:
        """Change how the site's weights are made; `unparametrise` must undo it."""

    def unparametrise(self, site: Any) -> None:
        """Put the site's weights back as `parametrise` found them."""

    def weights(self) -> Weights | None:
        """W_V and W_proj for this forward, by a mitigation that took them over in `parametrise`."""
        return None

    def values(self, v: Tensor, v0: Tensor) -> Tensor:
        """The values that attention averages."""
        return v

    def output(self, u: Tensor, v: Tensor, v0: Tensor, A: AttentionOperator) -> Tensor:
        """What attention returns, per head, before the output projection."""
        return u

    def features(self, y: Tensor, x: Tensor) -> Tensor:
        """What the attention branch returns after the output projection; x is what entered the branch."""
        return y

    def epilogue(self, so_far: Epilogue) -> Epilogue | None:
        """`so_far` with all that `values` and `output` do, for a kernel to do it instead; None where none can."""
        cls = type(self)
        does_nothing = cls.values is Mitigation.values and cls.output is Mitigation.output
        return so_far if does_nothing else None

    @property
    def needs_first_values(self) -> bool:
        """Whether v0 must be the first layer's values; assumed of all that have the chance to look at it."""
        cls = type(self)
        looks = cls.values is not Mitigation.values or cls.output is not Mitigation.output
        return looks and not cls.ignores_first_values

    @property
    def changes_features(self) -> bool:
        """Whether there is anything to do after the output projection."""
        return type(self).features is not Mitigation.features

    @property
    def spec(self) -> str:
        """The mitigation in one line; `parse` turns it back into an equal one."""
        name = self.name if type(self) is REGISTRY.get(self.name) else type(self).__name__.lower()
        options = [_written(key, getattr(self, key), default, self.positional) for key, default in options_of(self)]
        return ":".join(filter(None, [name, ",".join(filter(None, options))]))

    def __add__(self, other: Mitigation) -> Chain:
        return Chain([*_parts(self), *_parts(other)])

    def extra_repr(self) -> str:
        """Show the options in the model's printed form."""
        return ", ".join(f"{key}={getattr(self, key)!r}" for key, _ in options_of(self))


class Chain(Mitigation):
    """Several mitigations, applied hook by hook in the order written."""

    def __init__(self, parts: Iterable[Mitigation]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def build(self, shape: LayerShape) -> None:
        """Build every part for the layer."""
        for part in _parts(self):
            part.shape = shape
            part.build(shape)

    def parametrise(self, site: Any) -> None:
        """First to last, all or none."""
        done: list[Mitigation] = []
        try:
            for part in _parts(self):
                part.parametrise(site)
                done.append(part)
        except BaseException:
            for part in reversed(done):
                part.unparametrise(site)
            raise

    def unparametrise(self, site: Any) -> None:
        """Last to first, as undoing must go."""
        for part in reversed(_parts(self)):
            part.unparametrise(site)

    def weights(self) -> Weights | None:
        """Those of the part that makes them; a site does not release its weights to two."""
        for part in _parts(self):
            weights = part.weights()
            if weights is not None:
                return weights
        return None

    def values(self, v: Tensor, v0: Tensor) -> Tensor:
        """First to last."""
        for part in _parts(self):
            v = part.values(v, v0)
        return v

    def output(self, u: Tensor, v: Tensor, v0: Tensor, A: AttentionOperator) -> Tensor:
        """First to last: a later part sees the earlier one's u."""
        for part in _parts(self):
            u = part.output(u, v, v0, A)
        return u

    def features(self, y: Tensor, x: Tensor) -> Tensor:
        """First to last."""
        for part in _parts(self):
            y = part.features(y, x)
        return y

    def epilogue(self, so_far: Epilogue) -> Epilogue | None:
        """First to last; None where one part can not be done by a kernel."""
        found: Epilogue | None = so_far
        for part in _parts(self):
            found = None if found is None else part.epilogue(found)
        return found

    @property
    def needs_first_values(self) -> bool:
        """Whether a part does."""
        return any(part.needs_first_values for part in _parts(self))

    @property
    def changes_features(self) -> bool:
        """Whether a part has anything to do after the output projection."""
        return any(part.changes_features for part in _parts(self))

    @property
    def spec(self) -> str:
        """The parts' specs joined by `+`."""
        return "+".join(part.spec for part in _parts(self))

    def extra_repr(self) -> str:
        """Nothing: the parts print themselves."""
        return ""


def like_output(values: Tensor, u: Tensor) -> Tensor:
    """Values brought to the heads and rows of u.

    Grouped queries: each head of the values is repeated for the query heads that share it. With a cache the
    values reach further back than u: the last rows are u's own.
    """
    heads, kv_heads, rows = u.shape[1], values.shape[1], u.shape[2]
    if heads % kv_heads or values.shape[2] < rows or values.shape[0] != u.shape[0]:
        raise ShapeError(f"values {tuple(values.shape)} cannot be matched to an attention output {tuple(u.shape)}")
    if values.shape[2] > rows:
        values = values[:, :, -rows:]
    return repeat_heads(values, heads)


def options_of(mitigation: Mitigation | type[Mitigation]) -> list[tuple[str, Any]]:
    """The constructor's options and their defaults."""
    cls = mitigation if isinstance(mitigation, type) else type(mitigation)
    if cls.__init__ is nn.Module.__init__:
        return []
    return [(p.name, p.default) for p in list(inspect.signature(cls.__init__).parameters.values())[1:]]


def _parts(mitigation: Mitigation) -> list[Mitigation]:
    return list(mitigation.parts) if isinstance(mitigation, Chain) else [mitigation]  # type: ignore[arg-type]


def _written(key: str, value: Any, default: Any, positional: str | None) -> str:
    """One option of a spec; empty where leaving it out means the same."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if key == positional:
        return text.replace("e+", "e")  # 1e+16 would read as a combination
    return "" if value == default else f"{key}={text.replace('e+', 'e')}"
