"""Mitigations written in one line: `neutreno:0.6+featscale`."""

from __future__ import annotations

from typing import Any

from acutance.errors import AcutanceError
from acutance.mitigations.base import REGISTRY, Chain, Mitigation, options_of

EXAMPLE = "neutreno:0.6,learn=head"


def parse(spec: str) -> Mitigation:
    """Build a mitigation from its spec.

    Grammar: `name[:arg][,key=value]...`, joined by `+`; the first argument may stand without its key.

    Args:
        spec: e.g. `neutreno:0.6,learn=head` or `attnscale+featscale:doubled=true`.
    """
    parts = [_parse_one(part.strip()) for part in spec.split("+")]
    return parts[0] if len(parts) == 1 else Chain(parts)


def as_mitigation(mitigation: Mitigation | str | None) -> Mitigation:
    """Accept a mitigation, its spec, or None for the identity."""
    if mitigation is None:
        return Mitigation()
    if not isinstance(mitigation, (str, Mitigation)):
        raise AcutanceError(f"a mitigation is one such as NeuTRENO(0.6), or its spec {EXAMPLE!r}, not {mitigation!r}")
    return parse(mitigation) if isinstance(mitigation, str) else mitigation


def _parse_one(text: str) -> Mitigation:
    name, _, arguments = text.partition(":")
    if name not in REGISTRY:
        raise AcutanceError(
            f"unknown mitigation {name!r}; known: {', '.join(sorted(REGISTRY))}; write it like {EXAMPLE}"
        )
    cls = REGISTRY[name]
    options: dict[str, Any] = {}
    for position, argument in enumerate(arguments.split(",") if arguments else []):
        key, equals, value = (piece.strip() for piece in argument.partition("="))
        if not equals:
            key, value = _positional_key(cls, name, position, argument), key
        if key not in dict(options_of(cls)):
            raise AcutanceError(f"{name} has no option {key!r}; {_known_options(cls)}")
        if key in options:
            raise AcutanceError(f"{name} got {key!r} twice in {text!r}")
        options[key] = _value(value)
    return cls(**options)


def _positional_key(cls: type[Mitigation], name: str, position: int, argument: str) -> str:
    if cls.positional is None or position > 0:
        raise AcutanceError(f"{name}: write {argument!r} as key=value; {_known_options(cls)}")
    return cls.positional


def _known_options(cls: type[Mitigation]) -> str:
    names = [key for key, _ in options_of(cls)]
    return f"known options: {', '.join(names)}" if names else "it has no options"


def _value(text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if text.lower() == "none":
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
