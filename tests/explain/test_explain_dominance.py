"""Dominance against brute force on the explicit I + H⊗A, and against layers that are really repeated."""

import numpy as np
import pytest
import torch

import acutance as ac
from acutance.attention.operator import AttentionOperator
from acutance.explain.competitors import competitors, visible_keys
from acutance.explain.corners import corners
from acutance.explain.spectral_theory import Families, families, growth, other_eigenvalues

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


def dominating(A: AttentionOperator, H: torch.Tensor) -> Families:
    points = corners(np.linalg.eigvals(H.numpy())[None])
    return families(points, competitors(A, [points]).values)


@pytest.mark.parametrize("shift", [-1.5, -0.7, 0.0, 0.7])
@pytest.mark.parametrize(("kernel", "causal"), KERNELS)
def test_dominating_eigenvalue_is_brute_forces(kernel: str, causal: bool, shift: float) -> None:
    A, H = operator(kernel, causal), matrix(1, shift=shift)
    contest = dominating(A, H)
    found = (1 + torch.maximum(contest.constant, contest.varying)).sqrt()
    entries = A.dense()
    for b in range(A.shape[0]):
        for h in range(A.heads):
            layer = torch.eye(20) + torch.kron(H.contiguous(), entries[b, h].contiguous())
            assert float(found[b, h]) == pytest.approx(float(torch.linalg.eigvals(layer).abs().max()), rel=1e-9)
            # The constant family: I + H⊗A on constant tokens is I + H.
            constant = torch.linalg.eigvals(torch.eye(4) + H).abs().max()
            assert float((1 + contest.constant[b, h]).sqrt()) == pytest.approx(float(constant), rel=1e-9)


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
    assert families(z[:1], z[1:] / z[0]).leaning == 1


@pytest.mark.parametrize(("shift", "family"), [(0.6, 1), (-0.6, -1), (-2.6, 1)])
def test_dominating_family_decides_the_repeated_layer(shift: float, family: int) -> None:
    """X ← X + A X Hᵀ: HFC/LFC goes to 0 exactly when μ = 1 dominates, beyond the bound too."""
    A, H = operator("symmetric", False, heads=1, sharp=0.8), 0.2 * matrix(2) + shift * torch.eye(4)
    assert dominating(A, H).leaning.unique().tolist() == [family]
    X = start = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(400):
        X = X + A.dense()[:, 0] @ X @ H.mT
        X = X / X.norm(dim=(-2, -1), keepdim=True)
    before, after = ac.metrics.hfc_lfc_frobenius(start), ac.metrics.hfc_lfc_frobenius(X)
    assert bool((after < 1e-3 * before).all()) if family == 1 else bool((after > before).all())


@pytest.mark.parametrize(("kernel", "sharp"), [("symmetric", 1.0), ("softmax", 1.0), ("softmax", 4.0)])
def test_many_tokens_need_no_matrix(kernel: str, sharp: float, monkeypatch) -> None:
    """Above 512 tokens only products with A are made, and the answer is the dense one's, complex μ included."""
    A = operator(kernel, False, tokens=520, heads=2, batch=1, sharp=sharp)
    rows = torch.linalg.eigvals(A.dense()[0])
    lam = [torch.tensor([[-0.8 + 0j], [0.5 + 0.5j]]), torch.tensor([[-1.5 + 0.4j, -1.5 - 0.4j, 0.2]])]
    monkeypatch.setattr(AttentionOperator, "dense", lambda self: pytest.fail("the matrix was formed"))
    found = competitors(A, lam)
    assert found.values.shape == found.residuals.shape == (1, 2, 4)
    assert found.residuals.max() <= found.tolerance < 1e-9
    exact = other_eigenvalues(rows)
    np.testing.assert_allclose(found.smallest[0], exact.real.amin(-1), atol=1e-8)
    np.testing.assert_allclose(found.largest[0], exact.abs().amax(-1), atol=1e-8)
    if kernel == "softmax":
        best = growth(lam[1][..., :, None] * exact[..., None, :]).amax(-2).argmax(-1)
        assert exact.gather(-1, best[:, None]).imag.abs().max() > 1e-3, "a complex μ is meant to compete"
    for points in lam:
        wanted = families(points, exact[None])
        got = families(points, found.values, 0.0, found.residuals)
        np.testing.assert_allclose(got.varying, wanted.varying, rtol=0, atol=1e-8)
        assert got.leaning.tolist() == wanted.leaning.tolist()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", ["left", "right"])
@pytest.mark.parametrize("tokens", [9, 530])
def test_padding_is_no_competitor(causal: bool, where: str, tokens: int) -> None:
    """The eigenvalues are those of each sample by itself, without the zeros that masked tokens add."""
    lengths = [tokens, tokens - 3, 1] if tokens < 100 else [tokens - 5]
    q, k = torch.randn(2, len(lengths), 2, tokens, 3, generator=torch.Generator().manual_seed(0)).double()
    position = torch.arange(tokens)
    valid = torch.stack([position < n if where == "right" else position >= tokens - n for n in lengths])
    A = AttentionOperator(2 * q, k, mask=valid, causal=causal)
    assert torch.equal(visible_keys(A), valid)
    lam = torch.tensor([[-0.7 + 0.2j, 0.4]])
    found = competitors(A, [lam], visible_keys(A)).values
    for b, keep in enumerate(valid):
        alone = AttentionOperator(2 * q[b : b + 1, :, keep], k[b : b + 1, :, keep], causal=causal)
        others = other_eigenvalues(torch.linalg.eigvals(alone.dense())[0])
        np.testing.assert_allclose(families(lam, found[b]).varying, families(lam, others).varying, rtol=1e-7)
        np.testing.assert_allclose(found[b].real.amin(-1), others.real.amin(-1), atol=1e-7)


def test_one_token_is_a_tie() -> None:
    A = AttentionOperator(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 3))
    points = torch.tensor([[0.5 + 0j]])
    assert families(points, competitors(A, [points]).values).leaning.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_ties_are_measured_against_the_heads_own_size(scale: float) -> None:
    """A head of tiny weights beside one of large ones is no tie."""
    lam = torch.tensor([[1e-8 + 0j], [scale + 0j]], dtype=torch.complex128)
    others = torch.full((1, 2, 1), 0.5, dtype=torch.complex128)
    assert families(lam, others).leaning.tolist() == [[1.0, 1.0]]
    assert families(lam, torch.ones_like(others)).leaning.tolist() == [[0.0, 0.0]]
