"""Reproduction on stand-ins: every recipe is shrunk to a few steps."""

from functools import cache

import pytest

import standins
from acutance.lab import recipes
from acutance.lab.reproduce import find, measure
from acutance.lab.reproduce.run import Session

REAL = cache(recipes.load)


@pytest.fixture(scope="module", autouse=True)
def _tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand-ins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "load", cache(lambda name: standins.shrink(REAL(name), folder)))
        patch.setattr(measure, "EFFICIENCY_REPEATS", 3)
        patch.setattr(measure, "CORRUPTION_NAMES", ("gaussian_noise", "contrast"))
        yield


@pytest.fixture
def full_scale(monkeypatch):
    """Recipes as they are."""
    monkeypatch.setattr(recipes, "load", REAL)


@pytest.fixture
def session(tmp_path):
    """Makes sessions of one folder."""

    def make(target="neutreno-table8", out=tmp_path, **options):
        chosen = find(target) if isinstance(target, str) else target
        return Session(chosen, out, **{"seeds": 1, "samples": 8, "device": "cpu", **options})

    return make
