"""Dataclasses as plain data and back: what JSON or a command line said is checked against the fields' types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from acutance.errors import AcutanceError


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples as lists: what `json.dumps` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise AcutanceError(f"a configuration holds numbers, texts, tuples and dataclasses, not a {type(value).__name__}")


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """A value of this type, made from plain data; anything that does not fit is refused by name.

    Args:
        kind: a type as annotated: a dataclass, int, float, bool, str, a Literal, a union, a tuple or a Mapping.
        value: the plain data.
        where: its dotted name, for messages.
    """
    origin = get_origin(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_from(kind, value, where)
    if origin in (Union, UnionType):
        return _union_from(kind, value, where)
    if origin is Literal:
        if value in get_args(kind):
            return value
        hint = _hint(value, get_args(kind))
        raise AcutanceError(f"{where} is {describe(kind)}, not {_shown(value)}{hint}")
    if origin is tuple:
        return _tuple_from(kind, value, where)
    if kind is NoneType and value is None:
        return None
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and kind in (int, bool, str) and type(value) is kind:
        return value
    raise AcutanceError(f"{where} is {describe(kind)}, not {_shown(value)}")


def describe(kind: Any) -> str:
    """A type in words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list such as [{_EXAMPLES.get(arguments[0], '…')}, …]"
        return f"a list of {len(arguments)}, such as [{', '.join(_EXAMPLES.get(a, '…') for a in arguments)}]"
    return f"a {getattr(kind, '__name__', kind)}"


_EXAMPLES: Mapping[Any, str] = {int: "1", float: "0.9", str: '"text"', bool: "true"}


def unknown_field(where: str, name: str, known: list[str], elsewhere: Sequence[str] = ()) -> AcutanceError:
    """Says what is there instead, the nearest first; `elsewhere` are paths to fields of that very name."""
    place = f"{where} has no field" if where else "there is no field"
    hint = f", did you mean {' or '.join(elsewhere)}?" if elsewhere else _hint(name, known)
    return AcutanceError(f"{place} {name!r}{hint}; known: {', '.join(known)}")


def field_types(kind: type) -> dict[str, Any]:
    """The annotated type of every field."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _dataclass_from(kind: type, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise AcutanceError(f"{where} has fields of its own ({', '.join(field_types(kind))}): set these, not {where}")
    types = field_types(kind)
    for name in value:
        if name not in types:
            raise unknown_field(where, name, list(types))
    missing = [field.name for field in fields(kind) if field.name not in value and _is_required(field)]
    if missing:
        raise AcutanceError(f"{where or kind.__name__} lacks {', '.join(missing)}")
    dotted = f"{where}." if where else ""
    return kind(**{name: from_plain(types[name], entry, dotted + name) for name, entry in value.items()})


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _union_from(kind: Any, value: Any, where: str) -> Any:
    choices = get_args(kind)
    if value is None and NoneType in choices:
        return None
    own = [choice for choice in choices if choice is not NoneType]
    if len(own) == 1:
        try:
            return from_plain(own[0], value, where)
        except AcutanceError:
            if is_dataclass(own[0]):
                raise  # it names the very field
            raise AcutanceError(f"{where} is {describe(kind)}, not {_shown(value)}") from None
    for choice in own:
        try:
            return from_plain(choice, value, where)
        except AcutanceError:
            continue
    raise AcutanceError(f"{where} is {describe(kind)}, not {_shown(value)}")


def _tuple_from(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if not isinstance(value, (list, tuple)):
        raise AcutanceError(f"{where} is {describe(kind)}, not {_shown(value)}")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise AcutanceError(f"{where} is {describe(kind)}, not {_shown(value)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(from_plain(one, entry, f"{where}[{index}]") for index, (one, entry) in pairs)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _hint(name: object, known: Any) -> str:
    close = get_close_matches(str(name), [str(k) for k in known], n=1)
    return f", did you mean {close[0]}?" if close else ""
