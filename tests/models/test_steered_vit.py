"""A ViT with Eigen survives the disk, copies and layers of different kinds."""

import copy

import pytest
import torch
from small_models import images, seeded

import acutance as ac
from acutance.errors import AcutanceError
from acutance.mitigations import Eigen

NEGATIVE = "eigen:negative,basis=polar"


def output(model):
    return model.eval()(images(dtype=next(model.parameters()).dtype))


def test_layers_of_different_kinds_are_computed_apart():
    model = seeded()
    for site, chosen in zip(ac.sites.find(model), [Eigen("negative"), None, Eigen("positive", "polar")], strict=True):
        if chosen is not None:
            site.install(chosen.for_layer(site.shape(pretrained=True)).double())
    found = [torch.linalg.eigvals(site.projection_weight() @ site.value_weight()).real for site in ac.sites.find(model)]
    assert (found[0] < 0).all()
    assert (found[2] > 0).all()
    torch.testing.assert_close(output(model), output(ac.fold(model)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mitigation", ["eigen:negative,basis=cayley", "neutreno:0.6,learn=head+eigen:free"])
@pytest.mark.parametrize("layers", [None, (2,)])
def test_a_saved_model_comes_back_whole(tmp_path, mitigation, layers):
    model = seeded(mitigation=mitigation, dtype=torch.float32, mitigation_layers=layers)
    found = ac.load(ac.save(model, tmp_path / "model.safetensors"))
    assert found.config == model.config
    assert torch.equal(output(found), output(model))


def test_a_patched_model_is_saved_as_it_is(tmp_path):
    model = seeded(dtype=torch.float32)
    with ac.mitigate(model, NEGATIVE):
        assert torch.equal(output(ac.load(ac.save(model, tmp_path / "model.safetensors"))), output(model))


def test_plain_weights_do_not_load_into_a_steered_model():
    with pytest.raises(AcutanceError, match="load it into a plain model, then add the mitigation"):
        ac.io.load_checkpoint(seeded(mitigation=NEGATIVE), seeded().state_dict())


def test_copies_are_independent():
    model = seeded()
    handle = ac.mitigate(model, Eigen("negative"))
    before, other = output(model), copy.deepcopy(model)
    other.blocks[0].attn.mitigation.psi.data += 1
    assert torch.equal(output(model), before)
    assert not torch.equal(output(other), before)
    handle.remove()
    assert other.config.mitigation == "eigen:negative"
