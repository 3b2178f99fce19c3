"""Recipes: one function each, whose docstring says what to expect, at what cost, and by which command.

The first line of the docstring is what `acutance train --list` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from acutance.errors import AcutanceError
from acutance.lab.recipes.imagenet import deit_small, deit_tiny, deit_tiny_adapt, deit_tiny_symmetric
from acutance.lab.recipes.language import wikitext2, wikitext103
from acutance.lab.recipes.segmentation import ade20k, camvid
from acutance.lab.recipes.small_images import cifar10, cifar10_kernel, cifar100, digits, fashion_mnist
from acutance.lab.train.config import Config

IMAGENET = (deit_small, deit_tiny, deit_tiny_adapt, deit_tiny_symmetric)
SMALL_IMAGES = (cifar10, cifar100, cifar10_kernel, digits, fashion_mnist)
RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe for recipe in (*IMAGENET, *SMALL_IMAGES, ade20k, camvid, wikitext2, wikitext103)
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
        close = get_close_matches(name, names(), n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise AcutanceError(f"there is no recipe {name!r}{hint}; there are {', '.join(names())}")
    return RECIPES[name]
