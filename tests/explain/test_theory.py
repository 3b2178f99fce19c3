"""The theorems of https://arxiv.org/abs/2312.00751, each checked against something computed another way."""

from functools import partial

import numpy as np
import pytest
import torch
from spectrum_worlds import normal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError
from acutance.explain import theory

TOKENS, KEY_DIM, CHANNELS = 12, 6, 4
STRENGTHS = [0.05, 0.6, 1.0, 3.0]
exactly = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
nearly = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def keys(seed: int = 1) -> Tensor:
    return normal(2, 3, TOKENS, KEY_DIM, seed=seed)


def values(seed: int = 2) -> Tensor:
    return normal(2, 3, TOKENS, CHANNELS, seed=seed)


def constant() -> Tensor:
    return values()[..., :1, :].expand(2, 3, TOKENS, CHANNELS)


def symmetric(seed: int = 1) -> AttentionOperator:
    return AttentionOperator(keys(seed), keys(seed), kernel="symmetric")


def asymmetric(sharpness: float = 1.0) -> AttentionOperator:
    return AttentionOperator(sharpness * keys(seed=101), keys())


def rotation(tokens: int = 5) -> Tensor:
    """Row-stochastic, with eigenvalues 1 and 0.9 times the other roots of unity: far from the real axis."""
    return 0.9 * torch.roll(torch.eye(tokens, dtype=torch.float64), 1, dims=0) + 0.1 / tokens


either = pytest.mark.parametrize("attention", [symmetric, asymmetric])


# Theorem 1


def test_euler_step_is_symmetric_attention() -> None:
    k, v = keys(), values()
    step = theory.euler_step(v, theory.affinity(k) / 2)
    exactly(step, symmetric() @ v)
    exactly(step, scaled_dot_product_attention(k, k, v))
    exactly(theory.euler_step(v, theory.affinity(k, 0.3)), scaled_dot_product_attention(k, k, v, scale=0.3))


def test_only_the_symmetric_part_of_the_kernel_matters() -> None:
    v, kernel = values(), normal(2, 3, TOKENS, TOKENS).exp()
    both = kernel + kernel.mT
    exactly(theory.euler_step(v, kernel), (both / both.sum(-1, keepdim=True)) @ v)
    J = theory.nonlocal_functional
    torch.testing.assert_close(J(v, kernel), J(v, both) / 2, rtol=1e-12, atol=0)


def test_the_functional_falls_all_along_the_step_and_vanishes_only_on_constants() -> None:
    v, kernel = values(), theory.affinity(keys()) / 2
    towards, shares = theory.euler_step(v, kernel) - v, torch.linspace(0, 1, 21).tolist()
    along = torch.stack([theory.nonlocal_functional(v + t * towards, kernel) for t in shares])
    assert (along.diff(dim=0) < 0).all()
    assert (along > 0).all()
    assert (theory.nonlocal_functional(constant(), kernel) == 0).all()


# Lemma 1


def test_walks_average_to_repeated_attention() -> None:
    A, v, start, steps, walks = asymmetric(), values(), 4, 3, 20_000
    ends = theory.simulate_walks(A, v, start, steps, walks, torch.Generator().manual_seed(steps))
    assert ends.shape == (2, 3, walks, CHANNELS)
    mean, standard_error = ends.mean(-2), ends.std(-2) / walks**0.5
    expected = theory.walk_expectation(A, v, steps)
    assert ((mean - expected[..., start, :]).abs() < 5 * standard_error).all()
    # The bound is tight enough to tell one starting token from another.
    assert ((mean - expected[..., start + 1, :]).abs() > 5 * standard_error).any()
    stays = theory.simulate_walks(A, v, start, steps=0, walks=2)
    assert torch.equal(stays, v[..., start : start + 1, :].expand(2, 3, 2, CHANNELS))


# Lemma 2


def test_stationary_distribution_is_proportional_to_the_degrees() -> None:
    pi, dense = theory.degree_distribution(keys()), symmetric().dense()
    torch.testing.assert_close(pi.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    exactly((pi.unsqueeze(-2) @ dense).squeeze(-2), pi)
    limit = (pi.unsqueeze(-2) @ values()).expand(2, 3, TOKENS, CHANNELS)
    nearly(theory.smoothing_limit(dense, values()), limit)
    exactly(theory.smoothing_limit(symmetric(), values()), limit)


@either
def test_every_token_goes_to_the_same_limit(attention) -> None:
    A, v = attention().dense(), values()
    limit = theory.smoothing_limit(A, v)
    assert torch.equal(limit, limit[..., :1, :].expand_as(limit))
    nearly(theory.walk_expectation(A, v, 3000), limit)


@pytest.mark.parametrize("A", [symmetric(), asymmetric(sharpness=4)], ids=["symmetric", "asymmetric"])
def test_the_limit_is_approached_at_the_rate_of_the_second_eigenvalue(A: AttentionOperator) -> None:
    limit = theory.smoothing_limit(A.dense(), values())
    early = theory.walk_expectation(A.dense(), values(), 10)
    late = theory.walk_expectation(A.dense(), early, 10)
    # Complex pairs make single steps swing; over ten of them the geometric mean settles.
    shrinkage = ((late - limit).norm(dim=(-2, -1)) / (early - limit).norm(dim=(-2, -1))) ** 0.1
    torch.testing.assert_close(shrinkage, theory.smoothing_rate(A.dense()), rtol=0.05, atol=0)
    torch.testing.assert_close(theory.smoothing_rate(A), theory.smoothing_rate(A.dense()), rtol=1e-6, atol=0)


# Proposition 1


def gradient_of_regularised(u: Tensor, f: Tensor, kernel: Tensor, strength: float) -> Tensor:
    """Of E(u, f) = J(u) + ½ Σᵢ λᵢ‖uᵢ − fᵢ‖² with the paper's λᵢ = λ̃ / Δtᵢ."""
    u = u.detach().requires_grad_()
    weights = strength * (kernel + kernel.mT).sum(-1)
    energy = theory.nonlocal_functional(u, kernel) + 0.5 * (weights * (u - f).square().sum(-1)).sum(-1)
    return torch.autograd.grad(energy.sum(), u)[0]


def test_one_iteration_is_a_gradient_step_on_the_regularised_functional_and_the_limit_minimises_it() -> None:
    kernel, f, u = theory.affinity(keys()) / 2, values(), values(seed=3)
    expected = u - gradient_of_regularised(u, f, kernel, 0.6) / (2 * kernel).sum(-1, keepdim=True)
    exactly(theory.fidelity_iterate(symmetric(), f, 0.6, 1, start=u), expected)
    nearly(gradient_of_regularised(theory.fidelity_limit(symmetric(), f, 0.6), f, kernel, 0.6), torch.zeros_like(f))


@pytest.mark.parametrize("strength", STRENGTHS)
@either
def test_the_limit_is_the_closed_form(attention, strength: float) -> None:
    A, f = attention(), values()
    expected = np.linalg.solve((1 + strength) * np.eye(TOKENS) - A.dense().numpy(), strength * f.numpy())
    np.testing.assert_allclose(theory.fidelity_limit(A, f, strength).numpy(), expected, atol=1e-11)


@either
def test_the_iteration_reaches_the_limit_from_any_start(attention) -> None:
    A, f = attention(), values()
    assert theory.fidelity_converges(A, 0.6).all()
    for start in (None, values(seed=9)):
        nearly(theory.fidelity_iterate(A, f, 0.6, 300, start=start), theory.fidelity_limit(A, f, 0.6))


@pytest.mark.parametrize(
    "A",
    [symmetric().dense()[0, 0], asymmetric(sharpness=4).dense()[0, 0], rotation()],
    ids=["symmetric", "asymmetric", "rotation"],
)
def test_it_converges_below_the_boundary_and_diverges_above(A: Tensor) -> None:
    eigenvalues = np.linalg.eigvals(A.numpy())
    # Where the first eigenvalue leaves the open unit disc around λ̃ as λ̃ grows.
    boundary = float((eigenvalues.real + np.sqrt(1 - eigenvalues.imag**2)).min())
    f, errors = normal(A.shape[-1], CHANNELS), []
    for strength in (0.9 * boundary, 1.1 * boundary):
        limit = theory.fidelity_limit(A, f, strength)
        start = limit + normal(A.shape[-1], CHANNELS, seed=5)
        errors.append((theory.fidelity_iterate(A, f, strength, 3000, start) - limit).norm().item())
    assert theory.fidelity_converges(A, 0.9 * boundary)
    assert errors[0] < 1e-6
    assert not theory.fidelity_converges(A, 1.1 * boundary)
    assert errors[1] > 1e6


@pytest.mark.parametrize("strength", [-0.1, 0.0, 2.0])
def test_the_boundary_and_beyond_do_not_converge(strength: float) -> None:
    # μ = 1 is an eigenvalue of every A, so 0 and 2 are the ends of what can ever converge.
    assert not theory.fidelity_converges(asymmetric(), strength).any()


def test_symmetric_attention_converges_for_every_strength_up_to_one() -> None:
    assert torch.linalg.eigvals(symmetric().dense()).real.min() > 0
    assert all(theory.fidelity_converges(symmetric(), strength).all() for strength in (1e-3, 0.1, 0.5, 1.0))


@either
def test_the_limit_is_constant_only_if_f_is(attention) -> None:
    exactly(theory.fidelity_limit(attention(), constant(), 0.6), constant())
    assert (theory.fidelity_limit(attention(), values(), 0.6).std(-2) > 0.1).all()


@pytest.mark.parametrize("strength", STRENGTHS)
def test_a_known_share_of_the_variation_survives(strength: float) -> None:
    pi, f = theory.degree_distribution(keys()).unsqueeze(-1), values()
    limit = theory.fidelity_limit(symmetric(), f, strength)
    mean = (pi * f).sum(-2, keepdim=True)
    nearly((pi * limit).sum(-2, keepdim=True), mean)
    # Mode by mode the gain is λ̃/(1 + λ̃ − μ), and 0 < μ ≤ 1.
    survived = (pi * (limit - mean).square()).sum(-2).sqrt() / (pi * (f - mean).square()).sum(-2).sqrt()
    assert (survived > strength / (1 + strength)).all()
    assert (survived < 1).all()


@pytest.mark.parametrize("strength", [0, float("nan")])
def test_a_limit_without_strength_is_refused(strength: float) -> None:
    with pytest.raises(AcutanceError, match=f"above 0, got {strength}"):
        theory.fidelity_limit(symmetric(), values(), strength)


def test_many_tokens_reach_the_same_limit_without_the_matrix(monkeypatch) -> None:
    A, f = asymmetric(), values()
    solved = theory.fidelity_limit(A, f, 0.05)
    monkeypatch.setattr(theory, "DENSE_TOKENS", TOKENS - 1)
    monkeypatch.setattr(AttentionOperator, "dense", None)
    exactly(theory.fidelity_limit(A, f, 0.05), solved)


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
    A, f = asymmetric().to(dtype), values()
    expected = theory.fidelity_limit(A.to(torch.float64), f.to(dtype).double(), 0.6)
    limit = theory.fidelity_limit(A, f.to(dtype), 0.6)
    assert limit.dtype == (A @ f.to(dtype)).dtype == dtype
    torch.testing.assert_close(limit.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert theory.fidelity_limit(A, f, 0.6).dtype == torch.float64
