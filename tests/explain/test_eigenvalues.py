"""The eigenvalues that decide, against brute force on explicit matrices and against layers that are really repeated."""

import warnings

import numpy as np
import pytest
import torch
from spectrum_worlds import BareSite, head_matrices, layer_modes, random_layer
from torch import Tensor, nn

from acutance.attention import spectra
from acutance.attention.operator import AttentionOperator
from acutance.attention.spectra import tolerance_of
from acutance.errors import AcutanceWarning
from acutance.explain import weights
from acutance.explain.read import competing_eigenvalues
from acutance.explain.spectral_theory import families, growth, other_eigenvalues
from acutance.explain.weights import arnoldi_hull, convex_hull, layer_spectrum
from attention.operator_cases import normal

MUS = (1.0, 0.3, -0.3, -1.0, 0.2 + 0.4j, -0.9j)


def operator(kernel="softmax", causal=False, *, tokens=5, heads=2, batch=3, sharp=2.0, equal=False):
    q, k = sharp * normal(2, batch, 1 if equal else heads, tokens, 3, seed=tokens).expand(-1, -1, heads, -1, -1)
    return AttentionOperator(q, k, kernel=kernel, causal=causal)


@pytest.mark.parametrize(("kernel", "sharp"), [("symmetric", 1.0), ("softmax", 4.0)])
def test_many_tokens_need_no_matrix(kernel: str, sharp: float, monkeypatch) -> None:
    """Above 512 tokens only products with A are made, and the answer is the dense one's, complex μ included."""
    A = operator(kernel, tokens=520, batch=1, sharp=sharp)
    exact = other_eigenvalues(torch.linalg.eigvals(A.dense()[0]))
    lam = [torch.tensor([[-0.8 + 0j], [0.5 + 0.5j]]), torch.tensor([[-1.5 + 0.4j, -1.5 - 0.4j, 0.2]])]
    monkeypatch.setattr(AttentionOperator, "dense", lambda self: pytest.fail("the matrix was formed"))
    found, residuals = competing_eigenvalues(A, lam)
    assert found.shape == residuals.shape == (1, 2, 4)
    assert residuals.max() <= tolerance_of(A) < 1e-9
    np.testing.assert_allclose(found[0].real.amin(-1), exact.real.amin(-1), atol=1e-8)
    np.testing.assert_allclose(found[0].abs().amax(-1), exact.abs().amax(-1), atol=1e-8)
    if kernel == "softmax":
        best = growth(lam[1][..., :, None] * exact[..., None, :]).amax(-2).argmax(-1)
        assert exact.gather(-1, best[:, None]).imag.abs().max() > 1e-3, "a complex μ is meant to compete"
    for points in lam:
        wanted, got = families(points, exact[None]), families(points, found, 0.0, residuals)
        np.testing.assert_allclose(got.log_rate, wanted.log_rate, rtol=0, atol=1e-8)
        assert got.leaning.tolist() == wanted.leaning.tolist()


@pytest.mark.parametrize(("causal", "where"), [(False, "left"), (True, "right")])
@pytest.mark.parametrize("tokens", [9, 530])
def test_padding_is_no_competitor(causal: bool, where: str, tokens: int) -> None:
    """The eigenvalues are those of each sample by itself, without the zeros that masked tokens add."""
    lengths = [tokens, tokens - 3, 1] if tokens < 100 else [tokens - 5]
    q, k = normal(2, len(lengths), 2, tokens, 3)
    position = torch.arange(tokens)
    valid = torch.stack([position < n if where == "right" else position >= tokens - n for n in lengths])
    A = AttentionOperator(2 * q, k, mask=valid, causal=causal)
    lam = torch.tensor([[-0.7 + 0.2j, 0.4]])
    found, _ = competing_eigenvalues(A, [lam], valid)
    for b, keep in enumerate(valid):
        alone = AttentionOperator(2 * q[b : b + 1, :, keep], k[b : b + 1, :, keep], causal=causal)
        others = other_eigenvalues(torch.linalg.eigvals(alone.dense())[0])
        np.testing.assert_allclose(families(lam, found[b]).log_rate, families(lam, others).log_rate, rtol=1e-7)
        np.testing.assert_allclose(found[b].real.amin(-1), others.real.amin(-1), atol=1e-7)


@pytest.mark.parametrize("triangular", [0, 1])
def test_a_sample_with_a_triangular_mask_is_read_exactly_beside_others(triangular: int) -> None:
    q, k = normal(2, 2, 1, 530, 4).float()
    mask = torch.ones(2, 1, 530, 530, dtype=torch.bool)
    mask[triangular].tril_()
    A = AttentionOperator(q, k, mask=mask)
    found, residuals = competing_eigenvalues(A, [torch.tensor([[0.5 + 0j]])])
    lowest, entries = found.real.amin(-1)[:, 0], A.dense()[:, 0]
    assert float(lowest[triangular]) == pytest.approx(float(entries[triangular].diagonal().min()), abs=1e-6)
    exact = np.linalg.eigvals(entries[1 - triangular].double().numpy()).real.min()
    assert float(lowest[1 - triangular]) == pytest.approx(exact, abs=1e-3)
    assert (residuals.flatten(1).amax(1) > 0).tolist() == [triangular == 1, triangular == 0]


def test_ties_are_measured_against_the_heads_own_size() -> None:
    """A head of tiny weights beside one of large ones is no tie: growth keeps small differences."""
    lam = torch.tensor([[1e-20 + 0j], [1e8 + 0j]], dtype=torch.complex128)
    for mu, leaning in ((0.5, 1.0), (-1.0, 1.0), (1.0, 0.0)):
        others = torch.full((1, 2, 1), mu, dtype=torch.complex128)
        assert families(lam, others).leaning.tolist() == [[leaning, leaning]]
    assert growth(torch.tensor([1e-20 + 0j, -1e-20])).tolist() == pytest.approx([2e-20, -2e-20])


@pytest.mark.parametrize("shift", [-2.5, -0.5, 0.5])
@pytest.mark.parametrize("kernel", ["softmax", "symmetric"])
@pytest.mark.parametrize(("heads", "equal"), [(1, False), (3, True)])
def test_counting_is_exact_for_one_head_and_for_equal_attention(heads, equal, kernel, shift) -> None:
    site, A = random_layer((6, heads, heads, 6 // heads), shift), operator(kernel, tokens=6, heads=heads, equal=equal)
    constant, varying = layer_modes(site, A)
    points = convex_hull(layer_spectrum(site).deciding[None])
    counted = families(points, competing_eigenvalues(A, [points])[0].flatten(1)).leaning.tolist()
    assert counted == np.sign(constant - varying).tolist()
    assert np.abs(constant - varying).min() > 1e-4, "near ties are not what this is about"


def shifted(dim: int, scale: float, shift: float, turn: float = 0.0) -> tuple[Tensor, Tensor]:
    """Symmetric, but for a conjugate pair that turns; if it does so fast, it has the largest |1 + λ|."""
    M = normal(dim, dim) / (4 * dim) ** 0.5
    H = scale * (M + M.mT) + shift * torch.eye(dim)
    H[:2, :2] += turn * torch.tensor([[0, -1], [1, 0]])
    return H, torch.eye(dim).double()


CASES = {
    "symmetric": lambda dim: shifted(dim, 1.0, 0.0),
    "negative": lambda dim: shifted(dim, 0.2, -0.5),
    "one eigenvalue, which exhausts the Krylov space": lambda dim: shifted(dim, 0.0, -0.7),
    "general": lambda dim: (normal(dim, dim, seed=1) / dim**0.5, normal(dim, dim, seed=2) / dim**0.5),
    "turning": lambda dim: shifted(dim, 0.2, 0.3, turn=2.0),
    "zero": lambda dim: (torch.zeros(dim, 4).double(), normal(4, dim)),
    "low rank": lambda dim: (normal(dim, 7, seed=4) / dim**0.5, normal(7, dim, seed=5) / dim**0.5),
    "low rank, so that 0 is a corner": lambda dim: (-normal(3, dim).mT / dim**0.5, normal(3, dim) / dim**0.5),
}


@pytest.mark.parametrize("dim", [6, 300])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_outermost_are_those_of_the_matrix(case, dim: int) -> None:
    projection, value = case(dim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, error = arnoldi_hull(projection, value, layer=1)
    every = np.linalg.eigvals((projection @ value).numpy())
    for mu in MUS:
        np.testing.assert_allclose(np.abs(1 + found * mu).max(), np.abs(1 + every * mu).max(), rtol=1e-7)
    ends = (every.real.min(), every.real.max())
    assert (found.real.min(), found.real.max()) == pytest.approx(ends, abs=1e-7)
    assert np.abs(found[:, None] - every[None]).min(1).max() < 1e-7
    assert error < 1e-9


def test_float32_weights_are_read_as_such_and_the_error_says_so() -> None:
    projection, value = CASES["general"](200)
    found, error = arnoldi_hull(projection.float(), value.float(), layer=1)
    every = np.linalg.eigvals((projection @ value).numpy())
    assert np.abs(found[:, None] - every[None]).min(1).max() < 10 * error < 1e-3


def test_what_has_not_converged_warns_and_gives_its_residual(monkeypatch) -> None:
    """Eigenvalues all around a circle are never told apart by few products."""
    turn = torch.linalg.qr(normal(200, 200)).Q
    monkeypatch.setattr(spectra, "LARGEST_SPACE", 40)
    with pytest.warns(AcutanceWarning, match=r"layer 3: .* not all converged .* 40 vectors"):
        found, error = arnoldi_hull(turn, torch.eye(200).double(), layer=3)
    every = np.linalg.eigvals(turn.numpy())
    # H is normal, so an eigenvalue is within each residual: here they are no more than that off.
    for reach in (lambda z: np.abs(1 + z).max(), lambda z: z.real.max(), lambda z: -z.real.min()):
        assert 0 <= reach(every) - reach(found) < error
    assert error > 1e-3


@pytest.mark.parametrize("shape", [(48, 8, 2, 6), (20, 4, 4, 9)], ids=["grouped queries", "wide inside"])
def test_wide_layers_get_the_family_of_the_whole(shape, monkeypatch) -> None:
    """Of a layer with a pre-norm, without all eigenvalues of the whole H."""
    norm = nn.LayerNorm(shape[0]).double()
    norm.weight.data[::3] *= -2
    site = BareSite(*shape, norm=norm)
    exact = layer_spectrum(site, whole=True)
    monkeypatch.setattr(weights, "WHOLE_UP_TO", 2)
    wide = layer_spectrum(site)
    every = np.linalg.eigvals(sum(head_matrices(site)) * norm.weight.detach().numpy())
    for found in (exact, wide):
        for mu in MUS:
            np.testing.assert_allclose(np.abs(1 + found.deciding * mu).max(), np.abs(1 + every * mu).max(), rtol=1e-7)
        assert found.deciding.real.min() == pytest.approx(every.real.min(), abs=1e-7)
    assert (wide.family, wide.crossing is None) == (exact.family, exact.crossing is None)
    assert wide.tendency == pytest.approx(exact.tendency, abs=1e-9)
    assert wide.eigenvalues is None
    assert wide.symmetry == pytest.approx(exact.symmetry, rel=1e-9)


def test_a_family_within_the_error_is_unknown(monkeypatch) -> None:
    """max|1 + λ| of the layer is 1 + 1e-4; known to 1e-2 it might be below 1."""
    site = BareSite(30, 2, 2, 15)
    site.value, site.projection = torch.eye(30).double(), torch.linalg.qr(normal(30, 30)).Q
    site.projection = site.projection @ torch.diag(torch.linspace(-1.5, 1e-4, 30).double()) @ site.projection.mT
    monkeypatch.setattr(weights, "WHOLE_UP_TO", 2)
    sure = layer_spectrum(site)
    assert sure.family == "constant"
    monkeypatch.setattr(weights, "arnoldi_hull", lambda *_, layer: (sure.outer, 1e-2))
    blurred = layer_spectrum(site)
    assert blurred.family == "unknown"
    assert "known to 0.01 only" in blurred.note
