"""Mitigations written in one line: `neutreno:0.6+featscale`."""

from __future__ import annotations

from typing import Any

from acutance.errors import AcutanceError
from acutance.mitigations.base import REGISTRY, Combined, Mitigation, options_of

EXAMPLE = "neutreno:0.6,learn=head"
WORDS = {"true": True, "false": False, "none": None}


def parse(spec: str) -> Mitigation:
    """Build a mitigation from its spec `name[:arg][,key=value]…`, several joined by `+`.

    The first argument may stand without its key: `neutreno:0.6,learn=head`, `attnscale+featscale:doubled=true`.
    """
    parts = [_parse_one(part.strip()) for part in spec.split("+")]
    return parts[0] if len(parts) == 1 else Combined(parts)


def as_mitigation(mitigation: Mitigation | str | None) -> Mitigation:
    """Accept a mitigation, its spec, or None for the identity."""
    if mitigation is None or isinstance(mitigation, Mitigation):
        return mitigation or Mitigation()
    if not isinstance(mitigation, str):
        raise AcutanceError(f"a mitigation is one such as NeuTRENO(0.6), or its spec {EXAMPLE!r}, not {mitigation!r}")
    return parse(mitigation)


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
