"""`--set optim.lr=1e-3`: any field of a configuration from the command line, checked against its type."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from acutance.errors import AcutanceError
from acutance.lab.train.plain import field_types, from_plain, unknown_field

T = TypeVar("T")


Changes = dict[str, Any]  # by field, the text of a value or the changes within it


def override(config: T, assignments: Iterable[str]) -> T:
    """The configuration with these fields replaced; of a field that comes twice, the last counts.

    All are replaced at once, so that fields which must fit one another, such as dim and heads, come in any order.

    Args:
        config: a dataclass of dataclasses.
        assignments: `name.of.field=value`, the value as in JSON; a text needs no quotes.
    """
    changes: Changes = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise AcutanceError(f"--set takes name=value, such as optim.lr=1e-3, not {assignment!r}")
        path = [part.strip() for part in name.split(".")]
        if not _put(changes, path, text.strip()):  # a part of what is replaced as a whole: that comes first
            config, changes = _replaced(config, changes, done=""), {}
            _put(changes, path, text.strip())
    changed: T = _replaced(config, changes, done="")
    return changed


def _put(changes: Changes, path: list[str], text: str) -> bool:
    """Note a change; False if a part and the whole of a field would both be changed."""
    *parents, last = path
    for parent in parents:
        changes = changes.setdefault(parent, {})
        if isinstance(changes, str):
            return False
    if isinstance(changes.get(last), dict):
        return False
    changes[last] = text
    return True


def _replaced(config: Any, changes: Changes, done: str) -> Any:
    types = field_types(type(config))
    values = {}
    for name, change in changes.items():
        if name not in types:
            raise unknown_field(done, name, list(types), elsewhere=[] if done else _paths_of(name, config))
        here = f"{done}.{name}" if done else name
        current = getattr(config, name)
        if isinstance(change, str):
            values[name] = from_plain(_narrowed(types[name], current), _parsed(change, types[name]), here)
        elif is_dataclass(current):
            values[name] = _replaced(current, change, here)
        else:
            raise AcutanceError(f"{here} has no fields of its own, so there is no {here}.{next(iter(change))}")
    return replace(config, **values)


def _paths_of(name: str, config: Any) -> list[str]:
    """Where, further inside, there is a field of that name."""
    inside = {field: getattr(config, field) for field in field_types(type(config))}
    deeper = [
        f"{field}.{path}" for field, part in inside.items() if is_dataclass(part) for path in _paths_of(name, part)
    ]
    return [name] * (name in inside) + deeper


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
