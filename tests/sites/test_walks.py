"""A model's modules are gone through once where nobody changes it, and anew everywhere else."""

import pytest
from torch import nn

from acutance import sites
from acutance.models import ViT
from acutance.sites.structure import cached_lookup, modules_of


@pytest.fixture
def model():
    return ViT(image_size=8, patch_size=4, dim=16, depth=2, heads=2, num_classes=4)


def test_modules_are_those_of_named_modules(model):
    assert list(modules_of(model).items()) == list(model.named_modules())


def test_inside_a_walk_it_is_the_first_one_that_counts(model):
    with cached_lookup():
        first = modules_of(model)
        with cached_lookup():
            assert modules_of(model) is first
        assert modules_of(model) is first
    model.added = nn.Linear(2, 2)
    assert "added" in modules_of(model)


def test_layers_found_while_standing_are_looked_for_once(model, monkeypatch):
    walked = []
    named_modules = nn.Module.named_modules

    def counted(self, *args, **options):
        walked.extend([self] if self is model and not options.get("prefix") and len(args) < 2 else [])
        return named_modules(self, *args, **options)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    with sites.cached_lookup():
        assert len(sites.find(model)) == len(sites.find(model)) == 2
        sites.special_tokens(model)
    assert len(walked) == 1
    sites.find(model)
    assert len(walked) == 2
