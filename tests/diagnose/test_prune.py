"""Leaving layers out: the model is then the one without them, the cheapest go first, and the cost is measured."""

import copy

import numpy as np
import pytest
import torch

import acutance as ac
from acutance.diagnose.prune import prune, without
from acutance.errors import AcutanceError
from sites.tiny_models import left_alone
from tiny_folders import tiny


@pytest.fixture
def vit():
    torch.manual_seed(0)
    options = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 24, "depth": 4, "heads": 3, "num_classes": 4}
    return ac.models.ViT(**options).eval()


def batches():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(24, 1, 8, 8, generator=generator)
    return list(zip(images.split(8), torch.randint(0, 4, (24,), generator=generator).split(8), strict=True))


def test_without_layers_the_model_is_the_one_that_never_had_them(vit):
    images = batches()[0][0]
    shorter = copy.deepcopy(vit)
    del shorter.blocks[2], shorter.blocks[0]
    with left_alone(vit, lambda: vit(images)) as whole:
        with without(vit, [1, 3]):
            assert torch.equal(vit(images), shorter(images))
        assert not torch.equal(vit(images), shorter(images))
        assert torch.equal(vit(images), whole)


def test_an_idle_layer_goes_first_and_costs_nothing(vit):
    with torch.no_grad():  # the third block adds nothing at all
        for linear in (vit.blocks[2].attn.proj, vit.blocks[2].mlp.fc2):
            linear.weight.zero_()
            linear.bias.zero_()
    with left_alone(vit):
        found = ac.diagnose(vit, batches(), remove=2, progress=False)
    assert "--prune" in next(finding.advice for finding in found.findings if finding.name == "idle layers")
    alone = {removal.layers: removal for removal in found.removals}
    assert alone.keys() >= {(3,)}
    assert [len(removal.layers) for removal in found.removals] == [1, 1, 2]
    assert (alone[3,].influence, alone[3,].verdict) == (pytest.approx(0, abs=1e-6), "no clear change")
    assert "accuracy" in alone[3,].cost
    least = set(np.argsort(found.readings["influence"])[:2] + 1)
    assert set(found.removals[-1].layers) == least


def test_what_has_no_labels_is_compared_by_its_embeddings():
    bert = tiny("bert", num_hidden_layers=3, initializer_range=0.5).eval()
    ids = [{"input_ids": torch.randint(0, 30, (4, 9))} for _ in range(2)]
    with torch.no_grad():
        whole = torch.cat([bert(**batch).last_hidden_state.mean(1) for batch in ids])
        with without(bert, [2]):
            less = torch.cat([bert(**batch).last_hidden_state.mean(1) for batch in ids])
    (removal,) = prune(bert, ids, np.array([0.9, 0.1, 0.9]), 1, part=None)
    expected = float(torch.nn.functional.cosine_similarity(whole, less).mean())
    assert expected < 0.9999, "the model is another without the layer"
    assert removal.layers == (2,)
    assert f"cosine to the embeddings of the whole model 1 → {expected:,.4g}" in removal.cost
    assert str(removal).startswith("without layer 2: cosine")


def test_what_cannot_be_left_out_is_refused(vit):
    with pytest.raises(AcutanceError, match="pass a list"):
        ac.diagnose(vit, iter(batches()), remove=1)
    with pytest.raises(AcutanceError, match="4 of 4 layers cannot be left out: give 1 to 3"):
        prune(vit, batches(), np.ones(4), 4, part=None)
    albert = tiny("albert", num_hidden_layers=3).eval()
    with pytest.raises(AcutanceError, match="3 layers share 1 blocks"):
        ac.diagnose(albert, [{"input_ids": torch.randint(0, 30, (4, 9))}], remove=1, progress=False)
