"""timm's models inside transformers' wrapper are timm's all the same, though it goes past their forward."""

import json

import pytest
import torch
from timm_zoo import SMALL, gradients, images

import acutance as ac
from acutance import sites

transformers = pytest.importorskip("transformers", reason="make test installs it beside timm")
SIZES = {name: value for name, value in SMALL.items() if name != "num_classes"}


def wrapped():
    torch.manual_seed(0)
    config = transformers.TimmWrapperConfig(architecture="deit_tiny_distilled_patch16_224", model_args=SIZES)
    return transformers.TimmWrapperModel(config).double().eval()


def test_it_is_read_as_timms_own():
    model, taps = wrapped(), ["block", "attention", "values", "final"]
    assert sites.special_tokens(model) == (2, 0)
    assert sites.final_norm(model) is model.timm_model.norm
    ours = ac.measure(model, [{"pixel_values": images()}], metrics="all", tap=taps, prefix="out", progress=False)
    theirs = ac.measure(model.timm_model, [images()], metrics="all", tap=taps, prefix="out", progress=False)
    assert ours.readings == theirs.readings
    assert ours.context["versions"].keys() >= {"timm", "transformers"}


def test_it_is_mitigated_as_timms_own():
    model = wrapped()
    plain = model(images()).last_hidden_state
    with ac.mitigate(model, "neutreno:0.6+attnscale"):
        ours = model(images()).last_hidden_state
        found = gradients(model.timm_model.named_parameters(), ours.square().sum())
    assert torch.equal(model(images()).last_hidden_state, plain)
    assert not torch.equal(ours, plain)
    with ac.mitigate(model.timm_model, "neutreno:0.6+attnscale"):
        theirs = model.timm_model.forward_features(images())
        assert torch.equal(ours, theirs)
        wanted = gradients(model.timm_model.named_parameters(), theirs.square().sum())
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("part", ["", "timm_model"])
def test_it_is_saved_with_its_mitigation(tmp_path, part):
    model = wrapped()
    ac.mitigate(model.get_submodule(part), "neutreno:0.6")
    ac.save(model, tmp_path)
    noted = json.loads((tmp_path / "config.json").read_text())["acutance"]
    assert noted == {"TimmWrapperModel": {f"timm_model.blocks.{i}.attn": "neutreno:0.6" for i in range(3)}}
    loaded = ac.load(tmp_path).double().eval()
    assert torch.equal(loaded(images()).last_hidden_state, model(images()).last_hidden_state)
