"""What a mitigation is: six hooks around an attention layer, each the identity unless overridden."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from acutance.attention.affine import Program
from acutance.errors import AcutanceError

if TYPE_CHECKING:
    from acutance.attention.call import AttentionCall
    from acutance.mitigations.projection import Projection

NOTHING = Program()

REGISTRY: dict[str, type[Mitigation]] = {}

Weights = tuple[Tensor, Tensor]  # W_V as (kv_heads · head_dim, dim) and W_proj as (dim, heads · head_dim)
MaybeTensor = Tensor | None

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


class UnknownShape(LayerShape):
    """The shape of an attention whose weights were not found: reading a size raises the reason."""

    def __init__(self, layer: int, pretrained: bool, reason: str) -> None:
        self.__dict__.update(layer=layer, pretrained=pretrained, reason=reason)

    def __getattr__(self, name: str) -> int:
        if name in ("dim", "heads", "head_dim", "kv_heads"):
            raise AcutanceError(f"layer {self.layer}: {name} is not known. {self.reason}")
        raise AttributeError(name)  # as copying and pickling expect


def register(name: str) -> Callable[[_MitigationClass], _MitigationClass]:
    """Make a class known to `parse` under `name`."""

    def decorate(cls: _MitigationClass) -> _MitigationClass:
        holder = REGISTRY.get(name, cls)
        if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):  # a cell may be run again
            raise AcutanceError(f"the mitigation name {name!r} is taken by {holder.__name__}: choose another")
        REGISTRY[name] = cls
        cls.name = name
        return cls

    return decorate


@register("none")
class Mitigation(nn.Module):
    """The identity, and the base of every mitigation.

    A subclass overrides the hooks its paper needs. Its constructor takes options only and keeps each under its own
    name, which is what `spec` reads; parameters of a layer are made in `build`. Shapes: u, v and v⁰ are (batch, heads,
    tokens, head_dim), v and v⁰ possibly of fewer heads; x and y are (batch, tokens, dim). A formula that `Program` can
    express is written once, in `affine`: by default `values` and `output` apply it, and kernels fuse it.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[str | None] = None  # the option that stands without its key right after the colon
    # What it needs: first_values (call.v0), all_visible (no mask hides a token), all_tokens (after W_proj, a sample's
    # tokens together), nothing_between (u goes to W_proj as it is). Checked when it is installed and when it is called.
    requires: tuple[str, ...] = ()
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

    def parametrise(self, value: Projection, output: Projection) -> None:
        """Change how W_V and W_proj are made; `unparametrise` must undo it."""

    def unparametrise(self, value: Projection, output: Projection) -> None:
        """Put W_V and W_proj back as `parametrise` found them."""

    def weights(self) -> Weights | None:
        """W_V and W_proj, by a mitigation that makes them since `parametrise`: for models that ask before they run."""
        return None

    def enter(self) -> None:
        """This layer's block is about to run, in this thread."""

    def leave(self) -> None:
        """It has run, or failed."""

    def scores(
        self, q: MaybeTensor, k: MaybeTensor, call: AttentionCall
    ) -> tuple[MaybeTensor, MaybeTensor, MaybeTensor]:
        """Queries, keys and a bias on the logits, before the softmax."""
        return q, k, None

    def values(self, v: Tensor, call: AttentionCall) -> Tensor:
        """The values that attention averages."""
        program = self.affine(NOTHING, call)
        return v if program is None else program.values(v, call)

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        """What attention returns, per head, before the output projection; u is A w."""
        program = self.affine(NOTHING, call)
        return u if program is None else program.output(u, w, call)

    def features(self, y: Tensor, call: AttentionCall) -> Tensor:
        """What the attention branch returns after the output projection."""
        return y

    def stream(self, x_in: Tensor, x_out: Tensor, call: AttentionCall) -> Tensor:
        """What the block returns, given what entered it."""
        return x_out

    def affine(self, so_far: Program, call: AttentionCall) -> Program | None:
        """`so_far` with all that `values` and `output` do; None where a `Program` cannot express it."""
        return so_far

    def program(self, so_far: Program, call: AttentionCall) -> Program | None:
        """`affine` for a kernel; None where a subclass overrides what it stands for."""
        own = self.overrides("values") or self.overrides("output") or self.overrides("scores")
        return None if own else self.affine(so_far, call)

    def overrides(self, hook: str) -> bool:
        """Whether that hook does anything here."""
        return getattr(type(self), hook) is not getattr(Mitigation, hook)

    def check(self, call: AttentionCall) -> None:
        """Refuse what only a batch can tell."""
        if "all_visible" in self.requires:
            call.refuse_hidden(self.spec)

    @property
    def spec(self) -> str:
        """The mitigation in one line; `parse` turns it back into an equal one."""
        name = self.name if type(self) is REGISTRY.get(self.name) else type(self).__name__.lower()
        options = []
        for key, default in options_of(self):
            value = getattr(self, key)
            text = (str(value).lower() if isinstance(value, bool) else str(value)).replace("e+", "e")  # + joins specs
            if key == self.positional or value != default:
                options.append(text if key == self.positional else f"{key}={text}")
        return ":".join(filter(None, [name, ",".join(options)]))

    def __add__(self, other: Mitigation) -> Combined:
        return Combined([*parts_of(self), *parts_of(other)])

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={getattr(self, key)!r}" for key, _ in options_of(self))


class Combined(Mitigation):
    """Several mitigations, applied hook by hook in the order written."""

    def __init__(self, parts: Iterable[Mitigation]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def build(self, shape: LayerShape) -> None:
        for part in parts_of(self):
            part.shape = shape
            part.build(shape)

    def parametrise(self, value: Projection, output: Projection) -> None:
        """First to last, all or none."""
        done: list[Mitigation] = []
        try:
            for part in parts_of(self):
                part.parametrise(value, output)
                done.append(part)
        except BaseException:
            for part in reversed(done):
                part.unparametrise(value, output)
            raise

    def unparametrise(self, value: Projection, output: Projection) -> None:
        for part in reversed(parts_of(self)):
            part.unparametrise(value, output)

    def enter(self) -> None:
        for part in parts_of(self):
            part.enter()

    def leave(self) -> None:
        for part in parts_of(self):
            part.leave()

    def weights(self) -> Weights | None:
        """Those of the part that makes them; no two can."""
        for part in parts_of(self):  # no `:=` in a generator, which Dynamo of torch 2.11 cannot trace
            if (weights := part.weights()) is not None:
                return weights
        return None

    def scores(
        self, q: MaybeTensor, k: MaybeTensor, call: AttentionCall
    ) -> tuple[MaybeTensor, MaybeTensor, MaybeTensor]:
        """First to last; biases add up."""
        total: Tensor | None = None
        for part in parts_of(self):
            q, k, bias = part.scores(q, k, call)
            total = bias if total is None else total if bias is None else total + bias
        return q, k, total

    def values(self, v: Tensor, call: AttentionCall) -> Tensor:
        for part in parts_of(self):
            v = part.values(v, call)
        return v

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        for part in parts_of(self):
            u = part.output(u, w, call)
        return u

    def features(self, y: Tensor, call: AttentionCall) -> Tensor:
        for part in parts_of(self):
            y = part.features(y, call)
        return y

    def stream(self, x_in: Tensor, x_out: Tensor, call: AttentionCall) -> Tensor:
        for part in parts_of(self):
            x_out = part.stream(x_in, x_out, call)
        return x_out

    def program(self, so_far: Program, call: AttentionCall) -> Program | None:
        found: Program | None = so_far
        for part in parts_of(self):
            found = None if found is None else part.program(found, call)
        return found

    def overrides(self, hook: str) -> bool:
        return any(part.overrides(hook) for part in parts_of(self))

    def check(self, call: AttentionCall) -> None:
        for part in parts_of(self):
            part.check(call)

    @property
    def requires(self) -> tuple[str, ...]:  # type: ignore[override]
        """All that the parts need."""
        return tuple(dict.fromkeys(need for part in parts_of(self) for need in part.requires))

    @property
    def spec(self) -> str:
        return "+".join(part.spec for part in parts_of(self))

    def extra_repr(self) -> str:
        return ""  # the parts print themselves


def options_of(mitigation: Mitigation | type[Mitigation]) -> list[tuple[str, Any]]:
    """The constructor's options and their defaults."""
    cls = mitigation if isinstance(mitigation, type) else type(mitigation)
    if cls.__init__ is nn.Module.__init__:
        return []
    return [(p.name, p.default) for p in list(inspect.signature(cls.__init__).parameters.values())[1:]]


def parts_of(mitigation: Mitigation) -> list[Mitigation]:
    """The parts of a combination, or the mitigation itself."""
    return list(mitigation.parts) if isinstance(mitigation, Combined) else [mitigation]  # type: ignore[arg-type]
