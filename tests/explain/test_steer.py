"""Folding a steered model into a plain one, and the bound beyond which a negative spectrum smooths."""

import copy
import warnings
from itertools import product

import pytest
import torch
from spectrum_worlds import normal, watch

from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import explain
from acutance.explain.spectral_theory import layer_smooths, sharpening_bound
from acutance.explain.steer import check_spectrum, fold
from acutance.io.saving import load, save
from acutance.metrics import hfc_lfc_frobenius
from acutance.mitigations import eigen, parse
from acutance.models import Segmenter, ViT, vit_tiny_minus
from acutance.sites import find
from acutance.sites.mitigate import mitigate

BASES = ["qr", "polar", "cayley", "householder", "inverse"]
TINY = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3, "num_classes": 5}


def make(mitigation=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = ViT(**{**TINY, **options}, mitigation=mitigation)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def images(dtype=torch.float64):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("spectrum", ["square", "clipped", "bounded"])
@pytest.mark.parametrize("basis", BASES)
def test_folding_keeps_the_outputs(basis, spectrum):
    model = make(f"eigen:negative,basis={basis},spectrum={spectrum}")
    plain = fold(model)
    torch.testing.assert_close(plain(images()), model(images()), rtol=0, atol=1e-12)
    assert list(plain.state_dict()) == list(make().state_dict())
    assert {n: p.shape for n, p in plain.named_parameters()} == {n: p.shape for n, p in make().named_parameters()}
    assert all(p.requires_grad for p in plain.parameters())
    assert plain.config == make().config


@pytest.mark.parametrize("basis", BASES)
def test_folding_keeps_the_outputs_at_the_papers_size(basis):
    """ViT-Ti⁻ on 32×32: 12 layers, 192 channels, weights as large as trained ones."""
    torch.manual_seed(0)
    model, pictures = vit_tiny_minus(mitigation=f"eigen:negative,basis={basis}").double().eval(), normal(2, 3, 32, 32)
    for site in find(model):
        site.mitigation.psi.data.uniform_(0.3, 1.3)
    with torch.no_grad():
        expected = model(pictures)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(fold(model)(pictures), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mitigation", "rest"),
    [
        ("eigen+featscale", "featscale"),
        ("neutreno:0.6,learn=head+eigen:free,basis=polar", "neutreno:0.6,learn=head"),
        ("attnscale+eigen:positive+featscale", "attnscale+featscale"),
    ],
)
@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_other_mitigations_stay(tmp_path, mitigation, rest, layers):
    model = make(mitigation, mitigation_layers=layers)
    plain = fold(model)
    torch.testing.assert_close(plain(images()), model(images()), rtol=0, atol=1e-12)
    assert plain.config.mitigation == rest
    assert plain.config.mitigation_layers == layers
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


def test_a_folded_model_can_be_steered_again():
    """The constant that the biases add stays too, although W_proj is another."""
    plain = fold(make("eigen:negative,spectrum=clipped"))
    assert all(site.value_bias().abs().max() > 0.1 for site in find(plain))
    output, state = plain(images()), copy.deepcopy(plain.state_dict())
    handle = mitigate(plain, "eigen:negative,basis=polar,spectrum=clipped")
    assert max(handle.distances) < 1e-12
    assert not torch.equal(plain.blocks[0].attn.proj.bias, state["blocks.0.attn.proj.bias"])
    torch.testing.assert_close(plain(images()), output, rtol=0, atol=1e-10)
    handle.remove()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


def test_without_an_eigen_there_is_nothing_to_fold():
    with pytest.raises(AcutanceError, match="this ViT carries no eigen"):
        fold(make("featscale"))


def attention():
    """A 12-token head; symmetric, so its eigenvalues are real."""
    k = normal(1, 1, 12, 4)
    return AttentionOperator(k, k, kernel="symmetric").dense()[0, 0]


def ratio_after(A, W, steps=400):
    """HFC/LFC of X ← X + A X W, the size of X taken out at every step; 0 in the limit, or that of an eigenvector."""
    X = normal(12, len(W), seed=1)
    for _ in range(steps):
        X = X + A @ X @ W
        X = X / X.norm()
    return hfc_lfc_frobenius(X).item()


def one_layer(psi, sign="negative", spectrum="square"):
    """W_V W_proj of an Eigen with the given ψ."""
    (site,) = find(make(f"eigen:{sign},basis=polar,spectrum={spectrum}", depth=1))
    site.mitigation.psi.data = torch.as_tensor(psi, dtype=torch.float64).expand(12).clone()
    return (site.projection_weight() @ site.value_weight()).detach().T


@pytest.mark.parametrize(
    ("sign", "spectrum", "size", "smooths"),
    [
        ("positive", "square", 0.5, True),
        ("negative", "square", 0.9, False),  # as shares of the bound
        ("negative", "square", 1.1, True),
        *[("negative", kind, size, False) for kind in ("bounded", "clipped") for size in (0.5, 3.0, 1e3)],
    ],
)
def test_the_sign_decides_up_to_the_bound(sign, spectrum, size, smooths):
    A = attention()
    bound = sharpening_bound(torch.linalg.eigvals(A).real.min().item())
    assert -2 <= bound < -1
    psi = {"square": (-size * bound) ** 0.5, "bounded": size, "clipped": -size}[spectrum]
    after = ratio_after(A, one_layer(psi, sign, spectrum))
    assert after < 1e-8 if smooths else after > 1


@pytest.mark.parametrize(("factor", "smooths"), [(0.9, False), (1.1, False), (1.5, True), (2.0, True)])
def test_the_bound_is_for_one_eigenvalue_and_a_layer_smooths_by_all_of_them(factor, smooths):
    """One λ beyond the bound, the others −0.25: |1 + λ| must also beat |1 − 0.25 μ_min|."""
    mu_min = 0.133  # all eigenvalues of A but μ = 1
    A = mu_min * torch.eye(12, dtype=torch.float64) + (1 - mu_min) / 12
    lam = torch.full((12,), -0.25, dtype=torch.float64)
    lam[7] = factor * sharpening_bound(mu_min)
    assert layer_smooths(lam, mu_min) == smooths
    after = ratio_after(A, one_layer((-lam).sqrt()))
    assert after < 1e-8 if smooths else after > 1


def test_no_attention_has_a_bound_inside_the_bounded_spectrum():
    psi = torch.linspace(-50, 50, 101, dtype=torch.float64)
    for spectrum, mu_min in product(("bounded", "clipped"), (-0.99, -0.3, 0.0, 0.4, 0.999)):
        lam = eigen.eigenvalues(psi, "negative", spectrum)
        assert lam.min() >= -1 > sharpening_bound(mu_min)
        assert ((1 + lam * mu_min).abs() >= (1 + lam).abs()).all()


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_spectrum(model) == {}
        assert check_spectrum(make()) == {}
    find(model)[1].mitigation.psi.data[3] = 1.5
    message = r"layers 2 \(λ = -2.25, bound -2\) cross the.*μ_min taken as 0: for that.*smoothing as a whole: 2"
    with pytest.warns(AcutanceWarning, match=message):
        assert check_spectrum(model) == {2: pytest.approx(-2.25)}
    with pytest.warns(AcutanceWarning, match="bound -1.33.*taken as 0.5"):
        check_spectrum(model, mu_min=0.5)
    find(model)[1].mitigation.psi.data.fill_(0.1)
    find(model)[1].mitigation.psi.data[3] = 1.95**0.5
    with pytest.warns(AcutanceWarning, match="smoothing as a whole: none"):
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
    with pytest.warns(AcutanceWarning, match=r"2 \(λ = -1.69, bound -1.*μ_min as read on the batch"):
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
    with pytest.warns(AcutanceWarning, match="cross the bound") as caught:
        crossing = check_spectrum(model, batch=images())
    assert layer_smooths(torch.tensor([-(psi**2)]), explained.mu_min), "by the sharp head alone it would"
    assert crossing == {1: pytest.approx(explained.crossing)}
    assert explained.verdict == ("sharpening" if psi == 1.3 else "smoothing")
    said = str(caught[-1].message)
    assert f"bound {explained.bound:.3g})" in said
    assert ("smoothing as a whole: 1." in said) == (explained.verdict == "smoothing")
    assert ("smoothing as a whole: none." in said) == (explained.verdict == "sharpening")


def test_one_of_several_stacks_is_looked_at_in_its_model():
    model = Segmenter(image_size=8, patch_size=4, dim=12, depth=1, heads=3, decoder_depth=1, num_classes=3)
    model.decoder.install(parse("eigen:negative"))
    (site,) = find(model.decoder)
    site.mitigation.psi.data.fill_(1.6)
    with pytest.warns(AcutanceWarning, match="μ_min as read on the batch"):
        assert check_spectrum(model, batch=images(torch.float32), part="decoder") == {1: pytest.approx(-2.56, rel=1e-5)}
    assert check_spectrum(model, batch=images(torch.float32), part="encoder") == {}
