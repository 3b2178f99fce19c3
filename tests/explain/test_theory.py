"""The theorems of https://arxiv.org/abs/2312.00751, each checked against something computed another way."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, NonFiniteError
from acutance.explain import spectral_theory, theory
from attention.operator_cases import normal

TOKENS, CHANNELS = 12, 4
exactly, nearly = partial(assert_close, rtol=0, atol=1e-12), partial(assert_close, rtol=0, atol=1e-10)
Q, K = (normal(2, 3, TOKENS, 6, seed=seed) for seed in (101, 1))
V, OTHER = normal(2, 2, 3, TOKENS, CHANNELS, seed=2)
CONSTANT = V[..., :1, :].expand_as(V)
SYMMETRIC, ASYMMETRIC = AttentionOperator(K, K, kernel="symmetric"), AttentionOperator(Q, K)
SHARP = AttentionOperator(4 * Q, K)
# Row-stochastic, with eigenvalues 1 and 0.9 times the other roots of unity: far from the real axis.
ROTATION = 0.9 * torch.roll(torch.eye(5, dtype=torch.float64), 1, dims=0) + 0.1 / 5
either = pytest.mark.parametrize("A", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])


def test_only_the_symmetric_part_of_the_kernel_matters() -> None:
    """Theorem 1: if that part is exp(s kᵢ·kⱼ), an Euler step is symmetric attention."""
    exactly(theory.euler_step(V, theory.affinity(K) / 2), SYMMETRIC @ V)
    exactly(theory.euler_step(V, theory.affinity(K, 0.3)), scaled_dot_product_attention(K, K, V, scale=0.3))
    kernel, J = normal(2, 3, TOKENS, TOKENS).exp(), theory.nonlocal_functional
    both = kernel + kernel.mT
    exactly(theory.euler_step(V, kernel), (both / both.sum(-1, keepdim=True)) @ V)
    assert_close(J(V, kernel), J(V, both) / 2, rtol=1e-12, atol=0)


def test_the_functional_falls_all_along_the_step_and_vanishes_only_on_constants() -> None:
    kernel, shares = theory.affinity(K) / 2, torch.linspace(0, 1, 21).tolist()
    towards = theory.euler_step(V, kernel) - V
    along = torch.stack([theory.nonlocal_functional(V + t * towards, kernel) for t in shares])
    assert ((along.diff(dim=0) < 0) & (along[1:] > 0)).all()
    assert (theory.nonlocal_functional(CONSTANT, kernel) == 0).all()


def test_walks_average_to_repeated_attention() -> None:
    """Lemma 1."""
    start, steps, walks = 4, 3, 20_000
    ends = theory.simulate_walks(ASYMMETRIC, V, start, steps, walks, torch.Generator().manual_seed(steps))
    assert ends.shape == (2, 3, walks, CHANNELS)
    mean, standard_error = ends.mean(-2), ends.std(-2) / walks**0.5
    expected = theory.walk_expectation(ASYMMETRIC, V, steps)
    assert ((mean - expected[..., start, :]).abs() < 5 * standard_error).all()
    # The bound is tight enough to tell one starting token from another.
    assert ((mean - expected[..., start + 1, :]).abs() > 5 * standard_error).any()
    stays = theory.simulate_walks(ASYMMETRIC, V, start, steps=0, walks=2)
    assert torch.equal(stays, V[..., start : start + 1, :].expand(2, 3, 2, CHANNELS))


def test_stationary_distribution_is_proportional_to_the_degrees() -> None:
    """Lemma 2."""
    pi, dense = theory.degree_distribution(K), SYMMETRIC.dense()
    assert_close(pi.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    exactly((pi.unsqueeze(-2) @ dense).squeeze(-2), pi)
    limit = (pi.unsqueeze(-2) @ V).expand_as(V)
    nearly(theory.smoothing_limit(dense, V), limit)
    exactly(theory.smoothing_limit(SYMMETRIC, V), limit)


@pytest.mark.parametrize("A", [SYMMETRIC, SHARP], ids=["symmetric", "asymmetric"])
def test_the_limit_is_approached_at_the_rate_of_the_second_eigenvalue(A: AttentionOperator) -> None:
    dense = A.dense()
    limit, early = theory.smoothing_limit(dense, V), theory.walk_expectation(dense, V, 10)
    assert torch.equal(limit, limit[..., :1, :].expand_as(limit)), "the same for every token"
    late = theory.walk_expectation(dense, early, 10)
    # Complex pairs make single steps swing; over ten of them the geometric mean settles.
    shrinkage = ((late - limit).norm(dim=(-2, -1)) / (early - limit).norm(dim=(-2, -1))) ** 0.1
    assert_close(shrinkage, theory.smoothing_rate(dense), rtol=0.05, atol=0)
    assert_close(theory.smoothing_rate(A), theory.smoothing_rate(dense), rtol=1e-6, atol=0)
    nearly(theory.walk_expectation(dense, late, 3000), limit)


def gradient_of_regularised(u: Tensor, kernel: Tensor, strength: float) -> Tensor:
    """Of E(u, f) = J(u) + ½ Σᵢ λᵢ‖uᵢ − fᵢ‖² with the paper's λᵢ = λ̃ / Δtᵢ, at f = V."""
    u = u.detach().requires_grad_()
    weights = strength * (kernel + kernel.mT).sum(-1)
    energy = theory.nonlocal_functional(u, kernel) + 0.5 * (weights * (u - V).square().sum(-1)).sum(-1)
    return torch.autograd.grad(energy.sum(), u)[0]


def test_one_iteration_is_a_gradient_step_on_the_regularised_functional_and_the_limit_minimises_it() -> None:
    """Proposition 1."""
    kernel = theory.affinity(K) / 2
    expected = OTHER - gradient_of_regularised(OTHER, kernel, 0.6) / (2 * kernel).sum(-1, keepdim=True)
    exactly(theory.fidelity_iterate(SYMMETRIC, V, 0.6, 1, start=OTHER), expected)
    nearly(gradient_of_regularised(theory.fidelity_limit(SYMMETRIC, V, 0.6), kernel, 0.6), torch.zeros_like(V))


@pytest.mark.parametrize("strength", [0.05, 0.6, 1.0, 3.0])
@either
def test_the_limit_is_the_closed_form(A: AttentionOperator, strength: float) -> None:
    expected = np.linalg.solve((1 + strength) * np.eye(TOKENS) - A.dense().numpy(), strength * V.numpy())
    limit = theory.fidelity_limit(A, V, strength)
    np.testing.assert_allclose(limit.numpy(), expected, atol=1e-11)
    exactly(theory.fidelity_limit(A, CONSTANT, strength), CONSTANT)
    if A is SYMMETRIC:
        pi = theory.degree_distribution(K).unsqueeze(-1)
        mean = (pi * V).sum(-2, keepdim=True)
        nearly((pi * limit).sum(-2, keepdim=True), mean)
        # A known share of the variation survives: mode by mode the gain is λ̃/(1 + λ̃ − μ), and 0 < μ ≤ 1.
        survived = (pi * (limit - mean).square()).sum(-2).sqrt() / (pi * (V - mean).square()).sum(-2).sqrt()
        assert ((strength / (1 + strength) < survived) & (survived < 1)).all()


@either
def test_the_iteration_reaches_the_limit_from_any_start(A: AttentionOperator) -> None:
    assert theory.fidelity_converges(A, 0.6).all()
    limit = theory.fidelity_limit(A, V, 0.6)
    assert (limit.std(-2) > 0.1).all(), "not constant, as V is not"
    for start in (None, OTHER):
        nearly(theory.fidelity_iterate(A, V, 0.6, 300, start=start), limit)


DENSE = [SYMMETRIC.dense()[0, 0], SHARP.dense()[0, 0], ROTATION]


@pytest.mark.parametrize("A", DENSE, ids=["symmetric", "asymmetric", "rotation"])
def test_it_converges_below_the_boundary_and_diverges_above(A: Tensor) -> None:
    eigenvalues = np.linalg.eigvals(A.numpy())
    # Where the first eigenvalue leaves the open unit disc around λ̃ as λ̃ grows.
    boundary = float((eigenvalues.real + np.sqrt(1 - eigenvalues.imag**2)).min())
    f, errors = normal(A.shape[-1], CHANNELS), []
    for strength in (0.9 * boundary, 1.1 * boundary):
        limit = theory.fidelity_limit(A, f, strength)
        start = limit + normal(A.shape[-1], CHANNELS, seed=5)
        errors.append((theory.fidelity_iterate(A, f, strength, 3000, start) - limit).norm().item())
        assert bool(theory.fidelity_converges(A, strength)) == (strength < boundary)
    assert errors[0] < 1e-6 < 1e6 < errors[1]


def test_symmetric_attention_converges_for_strengths_above_zero_up_to_one() -> None:
    assert torch.linalg.eigvals(SYMMETRIC.dense()).real.min() > 0
    assert all(theory.fidelity_converges(SYMMETRIC, strength).all() for strength in (1e-3, 0.1, 0.5, 1.0))
    # μ = 1 is an eigenvalue of every A, so 0 and 2 are the ends of what can ever converge.
    assert not any(theory.fidelity_converges(ASYMMETRIC, strength).any() for strength in (-0.1, 0.0, 2.0))


@pytest.mark.parametrize("strength", [0, float("nan")])
def test_a_limit_without_strength_is_refused(strength: float) -> None:
    with pytest.raises(AcutanceError, match=f"above 0, got {strength}"):
        theory.fidelity_limit(SYMMETRIC, V, strength)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_is_named(value: float) -> None:
    A = SYMMETRIC.dense()
    A[0, 1, 2, 3] = value
    rates = (theory.smoothing_rate, partial(theory.smoothing_limit, v=V), partial(theory.fidelity_rate, strength=0.6))
    for of_matrix in (*rates, partial(theory.fidelity_limit, f=V, strength=0.6)):
        with pytest.raises(NonFiniteError, match=r"^A holds NaN"):
            of_matrix(A)
    for of_layer, name in (((A[0, 0], A[0, 1]), "H"), ((A[0, 1], A[0, 0]), "A")):
        with pytest.raises(NonFiniteError, match=f"^{name} holds NaN"):
            spectral_theory.limit(*of_layer)


def test_many_tokens_reach_the_same_limit_without_the_matrix(monkeypatch) -> None:
    solved = theory.fidelity_limit(ASYMMETRIC, V, 0.05)
    monkeypatch.setattr(theory, "DENSE_TOKENS", TOKENS - 1)
    monkeypatch.setattr(AttentionOperator, "dense", None)
    exactly(theory.fidelity_limit(ASYMMETRIC, V, 0.05), solved)


@pytest.mark.parametrize("strength", [3e-3, 5e-324])
def test_many_tokens_with_hardly_any_strength_are_refused(strength: float, monkeypatch) -> None:
    q = normal(1, 1, 513, 2)
    A = AttentionOperator(q, q)
    monkeypatch.setattr(AttentionOperator, "__matmul__", lambda _, u: u)  # the identity in place of A, for speed
    with pytest.raises(AcutanceError, match=rf"513 tokens at strength {strength:g} .*a strength of 4.0e-03 or more"):
        theory.fidelity_limit(A, q, strength)
    nearly(theory.fidelity_limit(A, q, 4.0e-3), q, atol=1e-9)  # what the message recommends is accepted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_limit_has_the_dtype_of_the_products(dtype: torch.dtype) -> None:
    A, f = ASYMMETRIC.to(dtype), V.to(dtype)
    limit, expected = theory.fidelity_limit(A, f, 0.6), theory.fidelity_limit(A.to(torch.float64), f.double(), 0.6)
    assert limit.dtype == (A @ f).dtype == dtype
    assert_close(limit.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert theory.fidelity_limit(A, V, 0.6).dtype == torch.float64
