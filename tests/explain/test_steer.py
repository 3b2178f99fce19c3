"""Folding a steered model into a plain one, and the bound beyond which a negative spectrum smooths."""

import copy
import warnings

import pytest
import torch
from spectrum_worlds import small_vit, watch

from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import explain
from acutance.explain.spectral_theory import layer_smooths, sharpening_bound
from acutance.explain.steer import check_spectrum, fold
from acutance.io.saving import load, save
from acutance.mitigations import parse
from acutance.models import Segmenter
from acutance.sites import find
from acutance.sites.mitigate import mitigate


def make(mitigation=None, **options):
    model = small_vit(in_chans=3, heads=3, num_classes=5, mitigation=mitigation, **options)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.double().eval()


def images(dtype=torch.float64):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("basis", "spectrum"),
    [("qr", "square"), ("polar", "clipped"), ("cayley", "bounded"), ("householder", "square"), ("inverse", "square")],
)
def test_folding_keeps_the_outputs(basis, spectrum):
    model = make(f"eigen:negative,basis={basis},spectrum={spectrum}")
    plain = fold(model)
    torch.testing.assert_close(plain(images()), model(images()), rtol=0, atol=1e-12)
    assert list(plain.state_dict()) == list(make().state_dict())
    shapes = [{n: (p.shape, p.requires_grad) for n, p in model.named_parameters()} for model in (plain, make())]
    assert (shapes[0], plain.config) == (shapes[1], make().config)


@pytest.mark.parametrize(
    ("mitigation", "rest", "layers"),
    [
        ("neutreno:0.6,learn=head+eigen:free,basis=polar", "neutreno:0.6,learn=head", None),
        ("attnscale+eigen:positive+featscale", "attnscale+featscale", (1, 3)),
    ],
)
def test_other_mitigations_stay(tmp_path, mitigation, rest, layers):
    model = make(mitigation, mitigation_layers=layers)
    plain = fold(model)
    torch.testing.assert_close(plain(images()), model(images()), rtol=0, atol=1e-12)
    assert (plain.config.mitigation, plain.config.mitigation_layers) == (rest, layers)
    assert plain.state_dict().keys() == make(rest, mitigation_layers=layers).state_dict().keys()
    again = load(save(plain.float(), tmp_path / "plain.safetensors")).eval()
    assert torch.equal(again(images(torch.float32)), plain(images(torch.float32)))


def test_the_steered_model_is_left_alone():
    model = make()
    output = model(images())
    handle = mitigate(model, "eigen:negative")
    steered = model(images())
    plain = fold(model)
    plain.blocks[0].attn.proj.weight.data += 1
    assert torch.equal(model(images()), steered)
    handle.remove()
    assert torch.equal(model(images()), output)
    with pytest.raises(AcutanceError, match="this ViT carries no eigen"):
        fold(model)


def test_a_folded_model_can_be_steered_again():
    """The constant that the biases add stays too, although W_proj is another."""
    plain = fold(make("eigen:negative,spectrum=clipped"))
    assert all(site.projections().value.offset().abs().max() > 0.1 for site in find(plain))
    output, state = plain(images()), copy.deepcopy(plain.state_dict())
    handle = mitigate(plain, "eigen:negative,basis=polar,spectrum=clipped")
    assert max(handle.distances) < 1e-12
    assert not torch.equal(plain.blocks[0].attn.proj.bias, state["blocks.0.attn.proj.bias"])
    torch.testing.assert_close(plain(images()), output, rtol=0, atol=1e-10)
    handle.remove()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


def steered(psi, mitigation="eigen:negative", **options):
    """Every ψ the same, and nothing else in H."""
    model = make(mitigation, **options)
    for site in find(model):
        site.mitigation.psi.data.fill_(psi)
        site.pre_norm().weight.data.fill_(1.0)
        if site.branch_gain() is not None:
            site.branch_gain().data.fill_(1.0)
    return model


def test_a_spectrum_beyond_the_bound_is_warned_of():
    model = steered(1.0)
    psi = find(model)[1].mitigation.psi.data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_spectrum(model) == check_spectrum(make()) == {}
    psi[3] = 1.5
    message = r"bound in layers 2 \(λ = -2.25 lies beyond .* = -2; constant\), with μ_min taken as 0: for that"
    with pytest.warns(AcutanceWarning, match=message):
        assert check_spectrum(model) == {2: pytest.approx(-2.25)}
    psi.fill_(0.1)
    psi[3] = 1.95**0.5
    with pytest.warns(AcutanceWarning, match=r"= -1.33; varying\).*taken as 0.5"):
        assert check_spectrum(model, mu_min=0.5) == {2: pytest.approx(-1.95)}


@pytest.mark.parametrize("where", ["norm", "layer scale"])
def test_the_effective_spectrum_is_the_one_that_is_checked(where):
    """A bounded Λ under a LayerNorm or LayerScale that multiplies it by 2.5, as explain sees it."""
    model = steered(3.0, "eigen:negative,spectrum=bounded", layer_scale=1.0)
    assert check_spectrum(model) == {}
    site = find(model)[2]
    (site.pre_norm().weight if where == "norm" else site.branch_gain()).data.fill_(2.5)
    with pytest.warns(AcutanceWarning):
        found, (_, _, explained) = check_spectrum(model), explain(model, progress=False).layers
    assert found == {3: pytest.approx(-2.5 * torch.tensor(3.0).sigmoid().item())}
    assert found[3] == pytest.approx(explained.spectrum.real.min())


def test_the_bound_is_read_on_a_batch_where_there_is_one():
    """Sharp attention in layer 2: its μ_min is well above 0, which leaves less room than the assumed 0."""
    model = steered(1.3, "eigen:negative,basis=polar", attention="symmetric")
    model.blocks[1].attn.kv.parametrizations.weight.original0.data = 1.2 * torch.eye(12, dtype=torch.float64)
    records = watch(model, images())[0]
    model.train()
    highest = {n: torch.linalg.eigvals(call.A.dense()).real.amin(-1).max().item() for n, call in records.items()}
    assert sharpening_bound(highest[2]) > -1.69, "layer 2 is meant to cross it"
    assert check_spectrum(model) == {}
    assert all(sharpening_bound(highest[n]) < -1.69 for n in (1, 3))
    with pytest.warns(AcutanceWarning, match=r"2 \(λ = -1.69 lies beyond .* = -1.*μ_min as read on the batch"):
        assert check_spectrum(model, batch=images()) == {2: pytest.approx(-1.69)}
    assert model.training


@pytest.mark.parametrize("psi", [1.3, 1.6])
def test_whether_a_layer_smooths_is_what_explain_says(psi):
    """One sharp head of three crosses the bound; the others decide whether the layer smooths, and explain has them."""
    model = steered(psi, "eigen:negative,basis=polar", attention="symmetric", depth=1)
    keys = model.blocks[0].attn.kv.parametrizations.weight.original0
    keys.data[:4] = 1.2 * torch.eye(4, 12, dtype=torch.float64)  # of the first head
    with pytest.warns(AcutanceWarning, match="crosses the bound"):
        explained = explain(model, [images()], progress=False)[1]
    with pytest.warns(AcutanceWarning, match="crosses the bound") as caught:
        crossing = check_spectrum(model, batch=images())
    assert layer_smooths(torch.tensor([-(psi**2)]), explained.mu_min), "by the sharp head alone it would"
    assert crossing == {1: pytest.approx(explained.crossing)}
    assert explained.family == ("varying" if psi == 1.3 else "constant")
    assert f"= {explained.bound:.3g}; {explained.family})" in str(caught[-1].message)


def test_one_of_several_stacks_is_looked_at_in_its_model():
    model = Segmenter(image_size=8, patch_size=4, dim=12, depth=1, heads=3, decoder_depth=1, num_classes=3)
    model.decoder.install(parse("eigen:negative"))
    (site,) = find(model.decoder)
    site.mitigation.psi.data.fill_(1.6)
    with pytest.warns(AcutanceWarning, match="μ_min as read on the batch"):
        assert check_spectrum(model, batch=images(torch.float32), part="decoder") == {1: pytest.approx(-2.56, rel=1e-5)}
    assert check_spectrum(model, batch=images(torch.float32), part="encoder") == {}
