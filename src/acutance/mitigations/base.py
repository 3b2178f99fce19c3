"""What a mitigation is: six hooks around an attention layer, each the identity unless overridden.

It can be written as one line of text: `neutreno:0.6+featscale`.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from torch import Tensor, nn

from acutance.attention.affine import NOTHING, Program
from acutance.attention.call import AttentionCall
from acutance.errors import AcutanceError
from acutance.mitigations.projection import Projection

Scores = tuple[Tensor | None, Tensor | None, Tensor | None]
REGISTRY: dict[str, type[Mitigation]] = {}
EXAMPLE = "neutreno:0.6,learn=head"
WORDS = {"true": True, "false": False, "none": None}
TYPES = {float: "a finite number", bool: "true or false", type(None): "none"}
_MitigationClass = TypeVar("_MitigationClass", bound="type[Mitigation]")


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
        raise AttributeError(name)  # copying and pickling expect it


@register("none")
class Mitigation(nn.Module):
    """The identity, and the base of every mitigation.

    A subclass overrides the hooks its paper needs. Its constructor takes options only, keeps each under its own name
    and calls `check_options`; `build` makes the parameters of one layer. Shapes: u, v and v⁰ are (batch, heads, tokens,
    head_dim), v and v⁰ possibly of fewer heads; x and y are (batch, tokens, dim). A formula that `Program` can express
    is written once, in `affine`: by default `values` and `output` apply it, and kernels fuse it.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[str | None] = None  # the option that a spec may give without its key, right after the colon
    # What it needs, checked when it is installed and when it is called:
    #   first_values     call.v0
    #   previous_values  call.previous, what the layer before gave to call.keep
    #   residual         call.residual, the tokens that enter the block
    #   all_visible      no mask hides a token, and attention is not causal
    #   all_tokens       after W_proj, a sample's tokens together, not in windows
    #   square           as many queries as keys, of the same tokens: none in a cache
    #   nothing_between  u goes to W_proj as it is
    #   plain_attention  A as the model makes it: no part before it changes what A does to values
    #   plain_scores     queries and keys as the model makes them: no part before it changes them
    #   plain_output     u as the model makes it, because it is replaced: no part before it changes it
    requires: tuple[str, ...] = ()
    changes_attention: ClassVar[bool] = False  # whether u is no longer A w, with the model's A, after it
    shape: LayerShape | None = None  # set once built for a layer
    distance: float | None = None  # ‖H − H₀‖/‖H₀‖ (‖H‖ if H₀ = 0) where it replaced the H₀ of a trained layer

    def build(self, shape: LayerShape) -> None:
        """Create the parameters of one layer."""

    def for_layer(self, shape: LayerShape) -> Self:
        """A fresh copy of this mitigation, built for one layer."""
        layer = copy.deepcopy(self)
        for part in parts_of(layer):
            part.shape = shape
            part.build(shape)
        layer.shape = shape
        return layer

    def parametrise(self, value: Projection, output: Projection) -> None:
        """Change how W_V and W_proj are made; `unparametrise` must undo it, also where this failed half way."""

    def unparametrise(self, value: Projection, output: Projection) -> None:
        """Put W_V and W_proj back as `parametrise` found them."""

    def enter(self) -> None:
        """Called before this layer's block runs, in its thread."""

    def leave(self) -> None:
        """Called after the block has run or failed."""

    def scores(self, q: Tensor | None, k: Tensor | None, call: AttentionCall) -> Scores:
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
        """`so_far` with what `values` and `output` do added; None if a `Program` cannot express it."""
        return so_far

    def program(self, so_far: Program | None, call: AttentionCall) -> Program | None:
        """`affine` for a kernel; None after None, and if a subclass overrides the hooks that it replaces."""
        own = self.overrides("values") or self.overrides("output") or self.overrides("scores")
        return None if own or so_far is None else self.affine(so_far, call)

    def overrides(self, hook: str) -> bool:
        """Whether this class overrides that hook."""
        return getattr(type(self), hook) is not getattr(Mitigation, hook)

    def is_lost_on(self, earlier: Mitigation) -> bool:
        """Whether a part before this one takes away what this one requires."""
        return any(LOST[need](earlier) for need in LOST.keys() & self.requires)

    @property
    def is_idle(self) -> bool:
        """Whether its options make it do nothing, such as λ̃ = 0."""
        return type(self) is Mitigation

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The constructor's options and their defaults."""
        parameters = inspect.signature(cls).parameters.values()
        return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    def check_options(self) -> None:
        """Refuse options that do not fit the constructor's annotations; a whole number becomes a float."""
        hints = get_type_hints(type(self).__init__)
        for key in self.options():
            value, kinds = getattr(self, key), _kinds(hints[key])
            if float in kinds and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(self, key, value := float(value))
            is_known = type(value) in kinds or value in [word for word in kinds if not isinstance(word, type)]
            if not is_known or (isinstance(value, float) and not math.isfinite(value)):
                words = " or ".join(TYPES.get(kind, repr(kind)) for kind in kinds)
                raise AcutanceError(f"{self.name}: {key} must be {words}, not {value!r}")

    @property
    def spec(self) -> str:
        """The mitigation in one line, with all options that differ from their defaults; `parse` reads it."""
        cls, said = type(self), []
        for key, default in self.options().items():
            value = getattr(self, key)
            text = (str(value).lower() if isinstance(value, bool) else str(value)).replace("e+", "e")  # + joins specs
            if key == cls.positional or value != default:
                said.append(text if key == cls.positional else f"{key}={text}")
        name = self.name if cls is REGISTRY.get(self.name) else cls.__name__.lower()
        return ":".join(filter(None, [name, ",".join(said)]))

    def __add__(self, other: Mitigation) -> Combined:
        return Combined([self, other])

    def extra_repr(self) -> str:
        return self.spec


LOST: dict[str, Callable[[Mitigation], bool]] = {  # whether a part before takes away what is required
    "plain_attention": lambda earlier: earlier.changes_attention,
    "plain_scores": lambda earlier: earlier.overrides("scores"),
    "plain_output": lambda earlier: earlier.overrides("output") or earlier.overrides("affine"),
}


def _in_turn(hook: str, passed_on: int | None = None) -> Any:
    """A combination's hook: each part's in turn, whose result is argument `passed_on` of the next."""

    def run(self: Combined, *arguments: Any) -> Any:
        for part in self.parts:
            result = getattr(part, hook)(*arguments)
            if passed_on is not None:
                arguments = (*arguments[:passed_on], result, *arguments[passed_on + 1 :])
        return None if passed_on is None else arguments[passed_on]

    return run


class Combined(Mitigation):
    """Several mitigations in one flat list, applied hook by hook in the order written."""

    parametrise, enter, leave = _in_turn("parametrise"), _in_turn("enter"), _in_turn("leave")
    values, output, features = _in_turn("values", 0), _in_turn("output", 0), _in_turn("features", 0)
    stream, program = _in_turn("stream", 1), _in_turn("program", 0)

    def __init__(self, parts: Iterable[Mitigation]) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(part for given in parts for part in parts_of(given))
        self.requires = tuple(need for part in parts_of(self) for need in part.requires)
        for earlier, part in itertools.combinations(parts_of(self), 2):
            if part.is_lost_on(earlier):
                why = f"{part.name} needs the model's own attention, which {earlier.name} before it has changed"
                swapped = f"write {part.spec}+{earlier.spec}"
                raise AcutanceError(f"{why}: {'use one of them' if earlier.is_lost_on(part) else swapped}")

    def unparametrise(self, value: Projection, output: Projection) -> None:
        for part in reversed(self.parts):
            part.unparametrise(value, output)

    def scores(self, q: Tensor | None, k: Tensor | None, call: AttentionCall) -> Scores:
        total: Tensor | None = None
        for part in self.parts:
            q, k, bias = part.scores(q, k, call)
            total = bias if total is None else total if bias is None else total + bias
        return q, k, total

    def overrides(self, hook: str) -> bool:
        return any(part.overrides(hook) for part in self.parts)

    @property
    def is_idle(self) -> bool:
        return all(part.is_idle for part in self.parts)

    @property
    def spec(self) -> str:
        return "+".join(part.spec for part in self.parts)


def parts_of(mitigation: Mitigation | None) -> list[Mitigation]:
    """The parts of a combination, or the mitigation itself; none of None."""
    return list(mitigation.parts) if isinstance(mitigation, Combined) else [] if mitigation is None else [mitigation]


def _kinds(hint: Any) -> list[Any]:
    """The types and words that a union or a Literal lists."""
    return [kind for part in get_args(hint) for kind in _kinds(part)] or [hint]


def parse(spec: str) -> Mitigation:
    """Build a mitigation from its spec `name[:arg][,key=value]…`, several joined by `+`.

    The first argument may stand without its key: `neutreno:0.6,learn=head`, `attnscale+featscale:doubled=true`.
    """
    if "+" in spec:
        return Combined(map(parse, spec.split("+")))
    name, _, arguments = spec.strip().partition(":")
    if (cls := REGISTRY.get(name.lower())) is None:
        near = difflib.get_close_matches(name.lower(), REGISTRY, n=1)
        meant = f", did you mean {near[0]!r}?" if near else ";"
        known = ", ".join(sorted(REGISTRY))
        raise AcutanceError(f"unknown mitigation {name!r}{meant} known: {known}; write it like {EXAMPLE}")
    names, options = list(cls.options()), dict[str, Any]()
    for argument in arguments.split(",") if arguments else []:
        key, equals, value = (piece.strip() for piece in argument.partition("="))
        if not equals and not options and cls.positional is not None:
            key, value = cls.positional, key
        if key not in names or key in options:
            known = f"its options, each once as key=value, are {', '.join(names)}" if names else "it has no options"
            raise AcutanceError(f"{name} cannot take {argument.strip()!r} of {spec.strip()!r}: {known}")
        options[key] = _value(value)
    return cls(**options)


def as_mitigation(mitigation: Mitigation | str | None) -> Mitigation:
    """Accept a mitigation, its spec, or None for the identity."""
    if isinstance(mitigation, str):
        return parse(mitigation)
    if mitigation is not None and not isinstance(mitigation, Mitigation):
        raise AcutanceError(f"a mitigation is one such as NeuTRENO(0.6), or its spec {EXAMPLE!r}, not {mitigation!r}")
    return mitigation or Mitigation()


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
