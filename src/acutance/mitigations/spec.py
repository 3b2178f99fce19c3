"""Mitigations and their options as one line of text: `neutreno:0.6+featscale`."""

from contextlib import suppress
from functools import reduce
from operator import add
from typing import Any

from acutance.errors import AcutanceError
from acutance.mitigations.base import REGISTRY, Mitigation

EXAMPLE = "neutreno:0.6,learn=head"
WORDS = {"true": True, "false": False, "none": None}


def parse(spec: str) -> Mitigation:
    """Build a mitigation from its spec `name[:arg][,key=value]…`, several joined by `+`.

    The first argument may stand without its key: `neutreno:0.6,learn=head`, `attnscale+featscale:doubled=true`.
    """
    return reduce(add, (_parse_one(part.strip()) for part in spec.split("+")))


def as_mitigation(mitigation: Mitigation | str | None) -> Mitigation:
    """Accept a mitigation, its spec, or None for the identity."""
    if isinstance(mitigation, str):
        return parse(mitigation)
    if mitigation is not None and not isinstance(mitigation, Mitigation):
        raise AcutanceError(f"a mitigation is one such as NeuTRENO(0.6), or its spec {EXAMPLE!r}, not {mitigation!r}")
    return mitigation or Mitigation()


def _parse_one(text: str) -> Mitigation:
    name, _, arguments = text.partition(":")
    cls = REGISTRY.get(name.lower())
    if cls is None:
        known = ", ".join(sorted(REGISTRY))
        raise AcutanceError(f"unknown mitigation {name!r}; known: {known}; write it like {EXAMPLE}")
    names, options = list(cls.options()), dict[str, Any]()
    for argument in arguments.split(",") if arguments else []:
        key, equals, value = (piece.strip() for piece in argument.partition("="))
        if not equals and not options and cls.positional is not None:
            key, value = cls.positional, key
        if key not in names or key in options:
            known = f"its options, each once as key=value, are {', '.join(names)}" if names else "it has no options"
            raise AcutanceError(f"{name} cannot take {argument.strip()!r} of {text!r}: {known}")
        options[key] = _value(value)
    return cls(**options)


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
