"""Recipes: one function each, whose docstring says what to expect, at what cost, and by which command.

Every public function of a file in this folder is one. `acutance train --list` shows the first line of its docstring.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction

from acutance.errors import AcutanceError
from acutance.lab.train.config import Config, hint

_FILES = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
RECIPES: dict[str, Callable[[], Config]] = {
    name: found
    for file in _FILES
    for name, found in vars(file).items()
    if isfunction(found) and found.__module__ == file.__name__ and not name.startswith("_")
}


def names() -> list[str]:
    """All recipes."""
    return sorted(RECIPES)


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (_recipe(name).__doc__ or "").partition("\n")[0]


def load(name: str) -> Config:
    """The configuration of a recipe."""
    return _recipe(name)()


def _recipe(name: str) -> Callable[[], Config]:
    if name not in RECIPES:
        raise AcutanceError(f"there is no recipe {name!r}{hint(name, names())}; there are {', '.join(names())}")
    return RECIPES[name]
