"""`--set optim.lr=1e-3`: any field of a configuration from the command line, checked against its type."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from acutance.errors import AcutanceError
from acutance.train.plain import field_types, from_plain, unknown_field

T = TypeVar("T")


def override(config: T, assignments: Iterable[str]) -> T:
    """The configuration with these fields replaced, left to right.

    Args:
        config: a dataclass of dataclasses.
        assignments: `name.of.field=value`, the value as in JSON; a text needs no quotes.
    """
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise AcutanceError(f"--set takes name=value, such as optim.lr=1e-3, not {assignment!r}")
        config = _replaced(config, name.strip().split("."), text.strip(), done="")
    return config


def _replaced(config: Any, path: list[str], text: str, done: str) -> Any:
    name, *rest = path
    types = field_types(type(config))
    if name not in types:
        raise unknown_field(done, name, list(types))
    here = f"{done}.{name}" if done else name
    current = getattr(config, name)
    if not rest:
        return replace(config, **{name: from_plain(_narrowed(types[name], current), _parsed(text, types[name]), here)})
    if not is_dataclass(current):
        raise AcutanceError(f"{here} has no fields of its own, so there is no {here}.{rest[0]}")
    return replace(config, **{name: _replaced(current, rest, text, here)})


def _narrowed(kind: Any, current: Any) -> Any:
    """A field annotated Any, such as the task, keeps the class it has."""
    return type(current) if kind is Any else kind


def _parsed(text: str, kind: Any) -> Any:
    """As JSON where it is that and the field is no text, else as it stands."""
    if kind is str:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"none": None, "true": True, "false": False}.get(text.lower(), text)
