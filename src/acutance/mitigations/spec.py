"""Mitigations and their options as one line of text: `neutreno:0.6+featscale`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from torch import nn

from acutance.errors import AcutanceError

if TYPE_CHECKING:
    from acutance.mitigations.base import Mitigation

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


def parse(spec: str) -> Mitigation:
    """Build a mitigation from its spec `name[:arg][,key=value]…`, several joined by `+`.

    The first argument may stand without its key: `neutreno:0.6,learn=head`, `attnscale+featscale:doubled=true`.
    """
    return reduce(add, (_parse_one(part.strip()) for part in spec.split("+")))


def as_mitigation(mitigation: Mitigation | str | None) -> Mitigation:
    """Accept a mitigation, its spec, or None for the identity."""
    if isinstance(mitigation, str):
        return parse(mitigation)
    identity = REGISTRY["none"]
    if mitigation is not None and not isinstance(mitigation, identity):
        raise AcutanceError(f"a mitigation is one such as NeuTRENO(0.6), or its spec {EXAMPLE!r}, not {mitigation!r}")
    return mitigation or identity()


def spec_of(mitigation: Mitigation) -> str:
    """The mitigation in one line, its positional option and those that are not at their default."""
    cls = type(mitigation)
    name = mitigation.name if cls is REGISTRY.get(mitigation.name) else cls.__name__.lower()
    options = []
    for key, default in options_of(cls):
        value = getattr(mitigation, key)
        text = (str(value).lower() if isinstance(value, bool) else str(value)).replace("e+", "e")  # + joins specs
        if key == cls.positional or value != default:
            options.append(text if key == cls.positional else f"{key}={text}")
    return ":".join(filter(None, [name, ",".join(options)]))


def options_of(cls: type[Mitigation]) -> list[tuple[str, Any]]:
    """The constructor's options and their defaults."""
    if cls.__init__ is nn.Module.__init__:
        return []
    return [(p.name, p.default) for p in list(inspect.signature(cls.__init__).parameters.values())[1:]]


def check_options(mitigation: Mitigation) -> None:
    """Refuse options that are not what the constructor's annotations say: numbers, truth values, words."""
    hints = get_type_hints(type(mitigation).__init__)
    for key, _ in options_of(type(mitigation)):
        value, kinds = getattr(mitigation, key), _kinds(hints[key])
        if not any(_is(value, kind) for kind in kinds):
            words = " or ".join(TYPES.get(kind, repr(kind)) for kind in kinds)
            raise AcutanceError(f"{mitigation.name}: {key} must be {words}, not {value!r}")
        setattr(mitigation, key, float(value) if float in kinds and value is not None else value)


def _kinds(hint: Any) -> list[Any]:
    """The types and words that a union or a Literal lists."""
    return [kind for part in get_args(hint) for kind in _kinds(part)] or [hint]


def _is(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind if isinstance(kind, type) else value == kind


def _parse_one(text: str) -> Mitigation:
    name, _, arguments = text.partition(":")
    cls = REGISTRY.get(name.lower())
    if cls is None:
        known = ", ".join(sorted(REGISTRY))
        raise AcutanceError(f"unknown mitigation {name!r}; known: {known}; write it like {EXAMPLE}")
    names = [key for key, _ in options_of(cls)]
    known = f"known options: {', '.join(names)}" if names else "it has no options"
    options: dict[str, Any] = {}
    for position, argument in enumerate(arguments.split(",") if arguments else []):
        key, equals, value = (piece.strip() for piece in argument.partition("="))
        if not equals:
            if cls.positional is None or position > 0:
                raise AcutanceError(f"{name}: write {argument!r} as key=value; {known}")
            key, value = cls.positional, key
        if key not in names:
            raise AcutanceError(f"{name} has no option {key!r}; {known}")
        if key in options:
            raise AcutanceError(f"{name} got {key!r} twice in {text!r}")
        options[key] = _value(value)
    return cls(**options)


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
