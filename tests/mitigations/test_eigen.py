"""Eigen: the promised spectra, the closest start, and nothing left of it when it goes."""

import pytest
import torch

from acutance.explain.steer import fold
from acutance.mitigations import Eigen, LayerShape
from acutance.mitigations import eigen as spectra
from acutance.sites import find
from acutance.sites.mitigate import mitigate
from parity.parity_formula import basis_of, spectrum_of
from sites.tiny_models import images, mitigated, vit

SIGNS = ["negative", "positive", "free"]
BASES = ["qr", "polar", "cayley", "householder", "inverse"]
SPECTRA = ["square", "clipped", "bounded"]


def trained(**options):
    """Weights of a size that every admissible interval cuts off."""
    model = vit(**options)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def branches(model):
    return [(site.projection_weight() @ site.value_weight()).detach() for site in find(model)]


def per_head(site):
    """H of every head: W_proj[:, h] W_V[h]."""
    value = site.value_weight().detach().unflatten(0, (site.heads, site.head_dim))
    projection = site.projection_weight().detach().unflatten(1, (site.heads, site.head_dim))
    return torch.einsum("ohc,hci->hoi", projection, value)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("sign", SIGNS)
def test_every_head_has_the_promised_spectrum(sign, basis, spectrum):
    low, high = spectra.admissible(sign, spectrum)
    model = vit()
    mitigated(model, Eigen(sign, basis, spectrum))
    for site in find(model):
        wanted = site.mitigation.eigenvalues().detach()
        assert wanted.shape == (3, 4)
        assert ((wanted >= low) & (wanted <= high)).all()
        for own, term in zip(wanted, per_head(site), strict=True):
            with_zeros = torch.cat([own, own.new_zeros(12 - 4)])  # the term has rank head_dim at most
            found = torch.linalg.eigvals(term)
            assert found.imag.abs().max() < 1e-6
            torch.testing.assert_close(found.real.sort().values, with_zeros.sort().values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("sign", "spectrum"), [("negative", "square"), ("positive", "bounded"), ("free", "clipped")])
@pytest.mark.parametrize("basis", BASES)
def test_weights_and_gradients_against_the_plain_formula(sign, basis, spectrum):
    eigen = Eigen(sign, basis, spectrum).for_layer(LayerShape(1, 12, 3, 4, 3)).double()
    generator = torch.Generator().manual_seed(0)
    eigen.theta.data = torch.randn(12, 12, dtype=torch.float64, generator=generator)
    eigen.psi.data = 0.4 * torch.randn(12, dtype=torch.float64, generator=generator)
    g = torch.randn(12, 12, dtype=torch.float64, generator=generator)
    theta, psi = (p.detach().clone().requires_grad_() for p in (eigen.theta, eigen.psi))
    v, lam = basis_of(basis, theta), spectrum_of(sign, spectrum, psi)
    expected = (torch.linalg.inv(v).T if basis == "inverse" else v) @ lam.diag() @ v.T
    value, projection = eigen.weights()
    torch.testing.assert_close(projection @ value, expected, rtol=0, atol=1e-10)
    found = torch.autograd.grad(projection @ value, (eigen.theta, eigen.psi), g)
    for ours, plain in zip(found, torch.autograd.grad(expected, (theta, psi), g), strict=True):
        assert (ours - plain).norm() < 1e-8 * plain.norm()


@pytest.mark.parametrize("sign", SIGNS)
def test_a_clipped_eigenvalue_comes_back_but_does_not_run_away(sign):
    low, high = spectra.admissible(sign, "clipped")
    psi = torch.tensor([low - 1, low, (low + high) / 2, high, high + 1]).requires_grad_()
    lam = spectra.eigenvalues(psi, sign, "clipped")
    assert lam.tolist() == [low, low, (low + high) / 2, high, high]
    for push, passes in ((1.0, [0, 1, 1, 1, 1]), (-1.0, [1, 1, 1, 1, 0])):  # descent moves ψ against the gradient
        (gradient,) = torch.autograd.grad((push * lam).sum(), psi, retain_graph=True)
        assert gradient.tolist() == [push * p for p in passes]


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("sign", SIGNS)
def test_psi_gives_back_its_eigenvalues_and_never_starts_dead(sign, spectrum):
    low, high = spectra.admissible(sign, spectrum)
    wanted = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    psi = spectra.psi_for(wanted, sign, spectrum).requires_grad_()
    lam = spectra.eigenvalues(psi, sign, spectrum)
    torch.testing.assert_close(lam, wanted.clamp(low, high), rtol=0, atol=spectra.EDGE + 1e-12)
    (gradient,) = torch.autograd.grad(lam.sum(), psi)
    assert gradient.abs().min() > 1e-4


@pytest.fixture
def _float64_throughout():
    """Also while a model is built, so that Θ and ψ are not rounded on the way."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.usefixtures("_float64_throughout")
def test_a_new_model_starts_from_the_eigenvectors_and_the_size_of_the_plain_one(sign, basis):
    plain = vit(dim=24)
    after_plain = torch.random.get_rng_state()
    steered = vit(mitigation=Eigen(sign, basis), dim=24)
    assert torch.equal(torch.random.get_rng_state(), after_plain)
    for H, steered_H in zip(branches(plain), branches(steered), strict=True):
        lam, v = torch.linalg.eigh((H + H.T) / 2)
        wanted = lam * H.norm() / lam.norm()
        if sign != "free":  # −ψ² and ψ² have no gradient at 0: the smallest start at EDGE
            assert wanted.abs().min() < spectra.EDGE < wanted.abs().max()
            wanted = wanted.abs().clamp_min(spectra.EDGE) * (1 if sign == "positive" else -1)
        torch.testing.assert_close(steered_H, (v * wanted) @ v.T, rtol=0, atol=1e-11)
    ours, theirs = dict(steered.named_parameters()), dict(plain.named_parameters())
    for name in ours.keys() & theirs.keys():
        rows = theirs[name][: len(ours[name])]
        assert torch.equal(ours[name], rows), name


@pytest.mark.parametrize("attention", ["softmax", "symmetric"])
def test_theta_and_psi_are_parameters_instead_of_w_v_and_w_proj(attention):
    plain, steered = vit(attention=attention), vit(mitigation="eigen", attention=attention)
    count = [sum(p.numel() for p in model.parameters()) for model in (plain, steered)]
    assert count[1] - count[0] == 3 * (12 - 12 * 12)
    added = {f"blocks.{i}.attn.mitigation.{name}" for i in range(3) for name in ("theta", "psi")}
    assert added <= steered.no_weight_decay() & dict(steered.named_parameters()).keys()
    plain.load_state_dict({name: tensor for name, tensor in steered.state_dict().items() if name not in added})
    torch.testing.assert_close(plain(images()), steered(images()), rtol=0, atol=1e-13)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("spectrum", ["clipped", "square"])
@pytest.mark.parametrize("sign", SIGNS)
def test_a_trained_layer_starts_from_the_closest_admissible_h(sign, spectrum, basis):
    """That of the symmetric part's eigenvectors, with each eigenvalue at the closest point of its interval."""
    model = trained(dim=6, heads=2, depth=1)
    model.blocks[0].attn.proj.weight.data *= 4
    (H,) = branches(model)
    handle = mitigate(model, Eigen(sign, basis, spectrum))
    (distance,), (closest,) = handle.distances, branches(model)
    assert f"distance={distance:.3g}" in repr(model.blocks[0].attn.mitigation)
    assert f"H moved by {distance:.0%}, " in repr(handle)
    low, high = spectra.admissible(sign, spectrum)
    lam, v = torch.linalg.eigh((H + H.T) / 2)
    assert (lam.min() < low and high < lam.max()) or spectrum == "square"  # the interval cuts off at both ends
    edge = spectra.EDGE if spectrum == "square" and sign != "free" else 0.0  # where ψ² keeps off its border
    low, high = (low, high - edge) if sign == "negative" else (low + edge, high)
    torch.testing.assert_close(closest, (v * lam.clamp(low, high)) @ v.T, rtol=0, atol=1e-12)
    assert distance == pytest.approx(((closest - H).norm() / H.norm()).item(), rel=1e-12)


def test_eigenpairs_go_to_the_heads_they_came_from():
    """A layer that is admissible already comes back head by head, whatever the order inside a head."""
    model = vit(mitigation="eigen:negative,spectrum=bounded", depth=1)
    model.blocks[0].attn.mitigation.psi.data = torch.randn(12, dtype=torch.float64)
    plain = fold(model)
    (expected,), (site,) = [per_head(s) for s in find(model)], find(plain)
    (distance,) = mitigate(plain, "eigen:negative,basis=cayley,spectrum=bounded").distances
    assert distance < 1e-10
    torch.testing.assert_close(per_head(site), expected, rtol=0, atol=1e-10)


def test_what_was_trained_besides_stays_when_it_goes():
    model = trained()
    value, bias = find(model)[0].value_weight().detach().clone(), model.blocks[0].attn.proj.bias
    before = bias.detach().clone()
    handle = mitigate(model, "eigen")
    kept = model.blocks[0].attn.qkv.parametrizations.weight.original0
    kept.data += 1
    bias.data += 1
    rows = kept.detach().clone()
    handle.remove()
    assert torch.equal(model.blocks[0].attn.qkv.weight, torch.cat([rows, value]))
    torch.testing.assert_close(bias.detach(), before + 1, rtol=0, atol=1e-12)


def test_a_branch_that_does_nothing_has_a_distance():
    model = trained()
    model.blocks[0].attn.proj.weight.data.zero_()
    for spec, most in (("eigen:negative,spectrum=clipped", 0.0), ("eigen:negative,spectrum=bounded", 0.01)):
        handle = mitigate(model, spec, layers=[1])
        assert 0 <= handle.distances[0] <= most
        handle.remove()


def test_a_model_without_memory_can_be_steered():
    with torch.device("meta"):
        model = vit(mitigation="eigen")
    tensors = [*model.parameters(), *model.state_dict().values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    model.load_state_dict(vit(mitigation="eigen").state_dict(), assign=True)
    assert model.blocks[0].attn.mitigation.theta.device.type == "cpu"
