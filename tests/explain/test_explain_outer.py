"""The outermost eigenvalues of a wide H, found from products, against all eigenvalues of the explicit matrix."""

import warnings

import numpy as np
import pytest
import torch
from spectrum_worlds import BareSite, head_matrices
from torch import Tensor, nn

import acutance as ac
from acutance.attention import spectra
from acutance.errors import AcutanceWarning
from acutance.explain import weights
from acutance.explain.outer import outer_eigenvalues
from acutance.explain.weights import layer_spectrum

MUS = (1.0, 0.3, -0.3, -1.0, 0.2 + 0.4j, -0.9j)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def symmetric(dim: int) -> tuple[Tensor, Tensor]:
    M = normal(dim, dim) / (4 * dim) ** 0.5
    return M + M.mT, torch.eye(dim, dtype=torch.float64)


def general(dim: int) -> tuple[Tensor, Tensor]:
    return normal(dim, dim, seed=1) / dim**0.5, normal(dim, dim, seed=2) / dim**0.5


def turning(dim: int) -> tuple[Tensor, Tensor]:
    """A conjugate pair 0.3 ± 2i stands out: it has the largest |1 + λ|."""
    M = 0.3 * normal(dim, dim, seed=3) / dim**0.5
    M[:2, :2] += torch.tensor([[0.3, -2.0], [2.0, 0.3]])
    return M, torch.eye(dim, dtype=torch.float64)


def low_rank(dim: int) -> tuple[Tensor, Tensor]:
    return normal(dim, 7, seed=4) / dim**0.5, normal(7, dim, seed=5) / dim**0.5


def low_rank_negative(dim: int) -> tuple[Tensor, Tensor]:
    """All eigenvalues but the zeros are negative: 0 itself is a corner, and has the largest |1 + λ|."""
    value = normal(3, dim, seed=6) / dim**0.5
    return -value.mT, value


def negative(dim: int) -> tuple[Tensor, Tensor]:
    M, eye = symmetric(dim)
    return 0.2 * M - 0.5 * torch.eye(dim), eye


def multiple(dim: int) -> tuple[Tensor, Tensor]:
    """One eigenvalue, dim times: the Krylov space is exhausted at once."""
    return -0.7 * torch.eye(dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64)


CASES = [symmetric, general, turning, low_rank, low_rank_negative, negative, multiple]


@pytest.mark.parametrize("dim", [6, 65, 300])
@pytest.mark.parametrize("case", CASES)
def test_the_outermost_are_those_of_the_matrix(case, dim: int) -> None:
    """Every maximum that explain takes over the spectrum comes out the same, and every value is an eigenvalue."""
    projection, value = case(dim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, error = outer_eigenvalues(projection, value, layer=1)
    every = np.linalg.eigvals((projection @ value).numpy())
    for mu in MUS:
        np.testing.assert_allclose(np.abs(1 + found * mu).max(), np.abs(1 + every * mu).max(), rtol=1e-7)
    assert found.real.min() == pytest.approx(every.real.min(), abs=1e-7)
    assert found.real.max() == pytest.approx(every.real.max(), abs=1e-7)
    assert np.abs(found[:, None] - every[None]).min(1).max() < 1e-7
    assert error < 1e-9


def test_a_zero_branch_has_a_zero_spectrum() -> None:
    found, error = outer_eigenvalues(torch.zeros(9, 4).double(), normal(4, 9), layer=1)
    assert found.tolist() == [0]
    assert error == 0


def test_float32_weights_are_read_as_such_and_the_error_says_so() -> None:
    projection, value = general(200)
    found, error = outer_eigenvalues(projection.float(), value.float(), layer=1)
    every = np.linalg.eigvals((projection @ value).numpy())
    assert np.abs(found[:, None] - every[None]).min(1).max() < 10 * error < 1e-3


def test_what_has_not_converged_warns_and_gives_its_residual(monkeypatch) -> None:
    """Eigenvalues all around a circle are never told apart by few products."""
    turn = torch.linalg.qr(normal(200, 200)).Q
    monkeypatch.setattr(spectra, "LARGEST_SPACE", 40)
    with pytest.warns(AcutanceWarning, match="layer 3: the outermost eigenvalues .* not all converged .* 40 vectors"):
        found, error = outer_eigenvalues(turn, torch.eye(200).double(), layer=3)
    every = np.linalg.eigvals(turn.numpy())
    # H is normal, so an eigenvalue is within each residual: here they are no more than that off.
    for reach in (lambda z: np.abs(1 + z).max(), lambda z: z.real.max(), lambda z: -z.real.min()):
        assert 0 <= reach(every) - reach(found) < error
    assert error > 1e-3


SHAPES = {"plain": (48, 4, 4, 12), "grouped queries": (48, 8, 2, 6), "narrow": (48, 2, 2, 5), "wide": (20, 4, 4, 9)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("gamma", [None, -1.0])
def test_wide_layers_get_the_verdict_of_the_whole(shape, gamma: float | None, monkeypatch) -> None:
    """With grouped queries and a pre-norm; no eigenvalues of the whole H are asked for."""
    norm = nn.LayerNorm(shape[0]).double()
    if gamma is not None:
        nn.init.constant_(norm.weight, gamma)
        norm.weight.data[::3] *= 2
    site = BareSite(*shape, norm=norm)
    exact = layer_spectrum(site, whole=True)
    monkeypatch.setattr(weights, "WHOLE_UP_TO", 2)
    monkeypatch.setattr(weights, "_whole_eigenvalues", lambda *_: pytest.fail("all eigenvalues were found"))
    wide = layer_spectrum(site)
    every = np.linalg.eigvals(sum(head_matrices(site)) * norm.weight.detach().numpy())
    for found in (exact, wide):
        assert found.deciding is not None
        for mu in MUS:
            np.testing.assert_allclose(np.abs(1 + found.deciding * mu).max(), np.abs(1 + every * mu).max(), rtol=1e-7)
        assert found.smoothing_gain == pytest.approx(np.abs(1 + every).max())
        assert found.deciding.real.min() == pytest.approx(every.real.min(), abs=1e-7)
    assert (wide.verdict, wide.crosses_bound) == (exact.verdict, exact.crosses_bound)
    assert wide.reason == exact.reason
    assert wide.eigenvalues is None
    assert wide.symmetry == pytest.approx(exact.symmetry, rel=1e-9)
    np.testing.assert_array_equal(wide.heads, exact.heads)


def test_a_verdict_within_the_error_is_unknown(monkeypatch) -> None:
    """max|1 + λ| of the first layer is 1 + 1e-4; known to 1e-2 it might be below 1."""
    site = BareSite(30, 2, 2, 15)
    site.value, site.projection = torch.eye(30).double(), torch.linalg.qr(normal(30, 30)).Q
    site.projection = site.projection @ torch.diag(torch.linspace(-1.5, 1e-4, 30).double()) @ site.projection.mT
    monkeypatch.setattr(weights, "WHOLE_UP_TO", 2)
    sure = layer_spectrum(site)
    assert sure.verdict == "smoothing"
    monkeypatch.setattr(weights, "outer_eigenvalues", lambda *_, layer: (sure.outer, 1e-2))
    blurred = layer_spectrum(site)
    assert blurred.verdict == "unknown"
    assert "known to 0.01 only" in blurred.reason


def test_explain_predicts_from_the_outermost_as_from_all(monkeypatch) -> None:
    """With data: the same counts, predictions and agreement, sample by sample."""
    from spectrum_worlds import DIM, set_branch, small_vit

    model = small_vit(depth=4).double()
    for layer, shift in enumerate([-1.2, -0.4, 0.3, -0.9], 1):
        set_branch(model, layer, 0.5 * normal(DIM, DIM, seed=layer) / DIM**0.5 + shift * torch.eye(DIM))
    batches = [normal(6, 1, 8, 8)]
    exact = ac.explain(model, batches, progress=False)
    monkeypatch.setattr(weights, "WHOLE_UP_TO", 2)
    wide = ac.explain(model, batches, progress=False)
    assert [layer.eigenvalues for layer in wide.layers] == [None] * 4
    for a, b in zip(exact.layers, wide.layers, strict=True):
        assert (a.dominance.whole, a.dominance.predicted) == (b.dominance.whole, b.dominance.predicted)
        assert (a.dominance.branch.agreement, a.verdict) == (b.dominance.branch.agreement, b.verdict)
        assert a.dominance.predicted_change == pytest.approx(b.dominance.predicted_change, rel=1e-6)
