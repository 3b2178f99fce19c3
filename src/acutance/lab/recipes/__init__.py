"""Recipes: one Python file each, whose docstring says what to expect, at what cost, and by which command.

A recipe has a function `config()` that returns the `Config` of the run. The first line of its docstring
is what `acutance train --list` shows.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from acutance.errors import AcutanceError
from acutance.lab.train.config import Config


def names() -> list[str]:
    """All recipes."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (_module(name).__doc__ or "").strip().partition("\n")[0]


def load(name: str) -> Config:
    """The configuration of a recipe."""
    config: Config = _module(name).config()
    return config


def _module(name: str) -> ModuleType:
    if name not in names():
        close = get_close_matches(name, names(), n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise AcutanceError(f"there is no recipe {name!r}{hint}; there are {', '.join(names())}")
    return import_module(f"{__name__}.{name}")
