"""What all tests of reproduction share."""

from functools import cache

import pytest

from acutance.lab import recipes


@pytest.fixture(scope="module", autouse=True)
def _recipes_are_loaded_once():
    """Some build a model to see its size; a plan of all targets would load them hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "load", cache(recipes.load))
        yield
