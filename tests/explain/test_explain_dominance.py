"""Dominance against brute force on the explicit I + H⊗A, and against layers that are really repeated."""

import numpy as np
import pytest
import torch
from spectrum_worlds import DIM, set_branch, small_vit

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning, NonFiniteError
from acutance.explain.dominance import corners, family_growths, growth, leaning, other_eigenvalues
from acutance.operator import AttentionOperator

KERNELS = [("softmax", False), ("symmetric", False), ("softmax", True), ("rbf", False)]


def operator(
    kernel: str, causal: bool, *, tokens: int = 5, heads: int = 2, batch: int = 3, sharp: float = 2.0
) -> AttentionOperator:
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(batch, heads, tokens, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    return AttentionOperator(sharp * q, sharp * k, kernel=kernel, causal=causal)


def matrix(seed: int, size: int = 4, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, size, dtype=torch.float64, generator=generator) / size**0.5 + shift * torch.eye(size)


@pytest.mark.parametrize("shift", [-1.5, -0.7, 0.0, 0.7])
@pytest.mark.parametrize(("kernel", "causal"), KERNELS)
def test_dominating_eigenvalue_is_brute_forces(kernel: str, causal: bool, shift: float) -> None:
    A, H = operator(kernel, causal), matrix(1, shift=shift)
    smoothing, other = family_growths(corners(np.linalg.eigvals(H.numpy())[None]), other_eigenvalues(A))
    found = (1 + torch.maximum(smoothing, other)).sqrt()
    entries = A.dense()
    for b in range(A.shape[0]):
        for h in range(A.heads):
            layer = torch.eye(20) + torch.kron(H.contiguous(), entries[b, h].contiguous())
            assert float(found[b, h]) == pytest.approx(float(torch.linalg.eigvals(layer).abs().max()), rel=1e-9)
            # The constant family: I + H⊗A on constant tokens is I + H.
            constant = torch.linalg.eigvals(torch.eye(4) + H).abs().max()
            assert float((1 + smoothing[b, h]).sqrt()) == pytest.approx(float(constant), rel=1e-9)


def test_corners_lose_nothing() -> None:
    values = torch.linalg.eigvals(torch.randn(60, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    rows = torch.stack([values, values.real + 0j]).numpy()
    kept = corners(rows)
    assert kept.shape[1] < 30
    for mu in (1.0, -0.3, 0.2 + 0.4j, -0.9j):
        np.testing.assert_allclose(growth(kept * mu).amax(-1), growth(rows * mu).max(-1), rtol=1e-12)


def test_growth_keeps_small_differences() -> None:
    z = torch.tensor([1e-20 + 0j, -1e-20 + 0j], dtype=torch.complex128)
    assert growth(z).tolist() == [2e-20, -2e-20]
    assert leaning(growth(z)[0], growth(z)[1], 1e-20) == 1


@pytest.mark.parametrize(("shift", "family"), [(0.6, 1), (-0.6, -1), (-2.6, 1)])
def test_dominating_family_decides_the_repeated_layer(shift: float, family: int) -> None:
    """X ← X + A X Hᵀ: HFC/LFC goes to 0 exactly when μ = 1 dominates, beyond the bound too."""
    A, H = operator("symmetric", False, heads=1, sharp=0.8), 0.2 * matrix(2) + shift * torch.eye(4)
    smoothing, other = family_growths(corners(np.linalg.eigvals(H.numpy())[None]), other_eigenvalues(A))
    assert leaning(smoothing, other, 1.0).unique().tolist() == [family]
    X = start = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(400):
        X = X + A.dense()[:, 0] @ X @ H.mT
        X = X / X.norm(dim=(-2, -1), keepdim=True)
    before, after = ac.metrics.hfc_lfc_frobenius(start), ac.metrics.hfc_lfc_frobenius(X)
    assert bool((after < 1e-3 * before).all()) if family == 1 else bool((after > before).all())


def test_explain_counts_what_brute_force_counts() -> None:
    """A trained-like model: large weights, both families occur; recount every sample, head and layer by hand."""
    torch.manual_seed(5)
    model = small_vit(depth=4).double()
    with torch.no_grad():
        for layer, shift in enumerate([-1.2, -0.4, 0.3, -0.9], 1):
            set_branch(model, layer, 0.5 * torch.randn(DIM, DIM) / DIM**0.5 + shift * torch.eye(DIM))
            model.blocks[layer - 1].attn.qkv.weight[: 2 * DIM].mul_(60)
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    spectrum = ac.explain(model, [images], progress=False)
    records, stream = {}, {}
    with torch.no_grad():
        for site in ac.sites.find(model):
            site.observe(lambda record, n=site.layer: records.__setitem__(n, record))
            site.block.register_forward_hook(
                lambda _, args, out, n=site.layer: stream.__setitem__(n, (args[0], out[0]))
            )
        model.eval()(images)
    for site in ac.sites.find(model):
        found, entries = spectrum[site.layer].dominance, records[site.layer].operator.dense()
        size = site.head_dim
        W, V = site.projection_weight().detach(), site.value_weight().detach()
        per_head = [
            np.linalg.eigvals((V[h * size : (h + 1) * size] @ W[:, h * size : (h + 1) * size]).numpy())
            for h in range(2)
        ]
        for name, lam in (("heads", per_head), ("whole", [np.linalg.eigvals((W @ V).numpy())] * 2)):
            for h in range(2):
                wins = [_smooths(lam[h], np.linalg.eigvals(entries[b, h].numpy())) for b in range(6)]
                assert getattr(found, name)[h].smoothing == pytest.approx(np.mean(wins))
                assert getattr(found, name)[h].sharpening == pytest.approx(1 - np.mean(wins))
        whole = np.linalg.eigvals((W @ V).numpy())
        predicted = [all(_smooths(whole, np.linalg.eigvals(entries[b, h].numpy())) for h in range(2)) for b in range(6)]
        before, after = stream[site.layer]
        ratio = ac.metrics.hfc_lfc_spectral
        for outcome, tokens in ((found.branch, before + records[site.layer].branch), (found.block, after)):
            fell = (ratio(tokens) < ratio(before)).tolist()
            assert outcome.fell == pytest.approx(np.mean(fell))
            assert outcome.agreement == pytest.approx(np.mean(np.equal(predicted, fell)))
            assert outcome.change == pytest.approx(float((ratio(tokens) / ratio(before)).log().mean()))
        lowest = torch.linalg.eigvals(entries).real.amin(-1)
        np.testing.assert_allclose(found.mu_min, lowest.mean(0), rtol=1e-9)
        np.testing.assert_allclose(found.mu_min_lowest, lowest.amin(0), rtol=1e-9)
        np.testing.assert_allclose(found.mu_min_highest, lowest.amax(0), rtol=1e-9)
    assert 0 < spectrum.share().smoothing < 1, "the case must be a mixed one"


def _smooths(lam: np.ndarray, mu: np.ndarray) -> bool:
    gains = np.abs(1 + lam[:, None] * mu[None])
    one = np.abs(mu - 1).argmin()
    return bool(gains[:, one].max() > np.delete(gains, one, axis=1).max())


def test_random_initialisation_smooths_everywhere() -> None:
    """Table 1 of arXiv 2401.04301, first column, in small: 100/0."""
    model = small_vit(dim=24, heads=3, depth=6)
    spectrum = ac.explain(model, [torch.randn(8, 1, 8, 8)], progress=False)
    for scope in ("whole", "heads"):
        assert spectrum.share(scope).smoothing == 1
        assert spectrum.share(scope).sharpening == 0
    assert str(spectrum.share()) == "100/0"
    assert {layer.verdict for layer in spectrum.layers} == {"smoothing"}


def test_batches_add_up_to_one() -> None:
    model = small_vit()
    images = torch.randn(7, 1, 8, 8)
    streamed = ac.explain(model, iter(images.split(3)), progress=False)
    at_once = ac.explain(model, [images], progress=False)
    for a, b in zip(streamed.layers, at_once.layers, strict=True):
        assert a.dominance.samples == b.dominance.samples == 7
        assert (a.dominance.heads, a.dominance.whole) == (b.dominance.heads, b.dominance.whole)
        assert a.dominance.branch.agreement == b.dominance.branch.agreement
        np.testing.assert_allclose(a.dominance.mu_min, b.dominance.mu_min, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(a.dominance.mu_min_highest, b.dominance.mu_min_highest, rtol=1e-4, atol=1e-7)
        assert a.dominance.block.change == pytest.approx(b.dominance.block.change, abs=1e-6)


def test_many_tokens_need_no_matrix(monkeypatch) -> None:
    """Above 512 tokens only products with A are made, and the answer is the dense one's."""
    k = torch.randn(1, 1, 520, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = AttentionOperator(k, k, kernel="symmetric")
    want = np.linalg.eigvals(A.dense()[0, 0].numpy()).real.min()
    monkeypatch.setattr(AttentionOperator, "dense", lambda self: pytest.fail("the matrix was formed"))
    found = other_eigenvalues(A)
    assert found.shape == (1, 1, 1)
    assert float(found.real) == pytest.approx(want, abs=1e-9)


def test_one_token_is_a_tie() -> None:
    A = AttentionOperator(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 3))
    smoothing, other = family_growths(torch.tensor([[0.5 + 0j]]), other_eigenvalues(A))
    assert leaning(smoothing, other, 0.5).tolist() == [[0.0], [0.0]]


def test_layer_scale_is_part_of_the_branch() -> None:
    model = small_vit(layer_scale=1e-3)
    images = torch.randn(2, 1, 8, 8)
    tokens, outputs = [], []
    model.blocks[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    model.blocks[0].ls1.register_forward_hook(lambda _, args, out: outputs.append(out))
    spectrum = ac.explain(model, [images], progress=False)
    ratio = ac.metrics.hfc_lfc_spectral
    want = float((ratio(tokens[0] + outputs[0]) / ratio(tokens[0])).log().mean())
    assert spectrum[1].dominance.branch.change == pytest.approx(want, abs=1e-6)


def test_negative_spectrum_beyond_the_bound_warns_and_smooths() -> None:
    """λ > −2/(1+μ_min) is exact: on both sides of it, with data."""
    model = small_vit(attention="symmetric", depth=1)
    attention = model.blocks[0].attn
    torch.nn.init.eye_(attention.kv.weight[-DIM:])
    images = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        attention.proj.weight.copy_(-torch.eye(DIM))
    bound = ac.explain(model, [images], progress=False)[1].bound
    assert -2 < bound < -1
    for factor, verdict in ((0.99, "sharpening"), (1.01, "smoothing")):
        with torch.no_grad():
            attention.proj.weight.copy_(-torch.eye(DIM))
            highest = float(ac.explain(model, [images], progress=False)[1].dominance.mu_min_highest.max())
            attention.proj.weight.copy_(factor * -2 / (1 + highest) * torch.eye(DIM))
        if verdict == "sharpening":
            assert ac.explain(model, [images], progress=False)[1].dominance.predicted.sharpening == 1
        else:
            with pytest.warns(AcutanceWarning, match="layer 1: the negative spectrum"):
                found = ac.explain(model, [images], progress=False)[1]
            assert found.crosses_bound
            assert "lies beyond" in found.reason
            assert found.dominance.predicted.smoothing > 0


def test_model_is_left_as_it_was_found() -> None:
    model = small_vit(dropout=0.1).train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    ac.explain(model, [torch.randn(2, 1, 8, 8)], progress=False)
    assert model.training
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(site.attention.observer is None for site in ac.sites.find(model))


def test_errors() -> None:
    model = small_vit()
    with pytest.raises(AcutanceError, match="no batches"):
        ac.explain(model, [], progress=False)
    with pytest.raises(AcutanceError, match="'fold' or 'ignore'"):
        ac.explain(model, norm="maybe")
    with pytest.raises(NonFiniteError, match="layer 1"):
        ac.explain(model, [torch.full((1, 1, 8, 8), torch.nan)], progress=False)
    with pytest.raises(AcutanceError, match="needs data"):
        ac.explain(model, progress=False).share()


def test_mitigations_beside_the_weights_are_named() -> None:
    assert ac.explain(small_vit(mitigation="neutreno:0.6"), progress=False).context["outside H"] == "neutreno:0.6"
    assert ac.explain(small_vit(mitigation="eigen:negative"), progress=False).context["outside H"] is None
    assert ac.explain(small_vit(), progress=False).context["outside H"] is None
