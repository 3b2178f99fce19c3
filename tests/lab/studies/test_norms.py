"""What a norm makes of the repeated layer, against the repeated layer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import TOKENS, WIDTH, centred_branch, normal

from acutance import metrics
from acutance.errors import AcutanceError, NonFiniteError
from acutance.explain import spectral_theory as theory
from acutance.lab.studies import random_attention, repeat
from acutance.lab.studies.norms import centred_spectrum, groups_rate, post_norm, ratio_at_equal_size
from attention.operator_cases import assert_same_set


def lazy(mu=0.5):
    """Every eigenvalue of A but μ = 1 is the same."""
    return mu * torch.eye(TOKENS, dtype=torch.float64) + (1 - mu) / TOKENS


def near(token, spread=1e-3, seed=9):
    return token + spread * normal(TOKENS, WIDTH, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_centred_spectrum_is_that_of_the_projected_matrix_without_the_mean(seed):
    H, gamma = normal(WIDTH, WIDTH, seed=seed), normal(WIDTH, seed=seed + 10)
    P = torch.eye(WIDTH, dtype=torch.float64) - 1 / WIDTH
    brute = torch.linalg.eigvals(P @ H @ gamma.diag() @ P)
    found = torch.cat([centred_spectrum(H, gamma), torch.zeros(1)])  # P's own zero
    assert_same_set(found, brute.numpy(), 1e-9)


# Post-LN: the limit and the rate near equal tokens


def assert_reached(found, H, A, gamma=1.0, layers=150, spread=1e-3):
    """Nearly equal tokens fall at the rate into the limit."""
    path = repeat(near(found.token, spread), H.mT, A, layers=layers, norm="post", norm_weight=gamma)
    ratios = path.hfc_lfc[0]
    last = int(np.flatnonzero(ratios > 1e-11)[-1])  # what is lower is rounding
    factor = (ratios[last] / ratios[last // 2]) ** (1 / (last - last // 2))
    assert factor == pytest.approx(found.rate, rel=0.03)
    sign = float(torch.sign(path.last[0] @ found.token))
    torch.testing.assert_close(sign * path.last, found.token.expand(TOKENS, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("lam", [[1.0, 0.3, 0.2, 0.1], [0.5, -0.5, -0.5, -0.6], [-4.0, -3.0, -3.0, -3.5]])
def test_nearly_equal_tokens_fall_at_the_rate_into_the_limit(lam, symmetric):
    A = random_attention(TOKENS, 0.6 if symmetric else 1.2, symmetric=symmetric, seed=4)
    H, _ = centred_branch(lam)
    mu = torch.linalg.eigvals(A)
    found = post_norm(H, mu)
    lead = max(range(len(lam)), key=lambda j: abs(1 + lam[j]))
    rest = torch.tensor([*lam[:lead], *lam[lead + 1 :]], dtype=mu.dtype)
    closed = float((1 + torch.outer(rest, theory.other_eigenvalues(mu))).abs().max()) / abs(1 + lam[lead])
    assert (found.gain, found.rate) == pytest.approx((1 + lam[lead], closed), rel=1e-9)
    assert found.rate < theory.ratio_rate(torch.tensor(lam, dtype=mu.dtype), mu)
    assert_reached(found, H, A)


MIXED = torch.tensor([1.0, -0.7, 1.3, -1.1, 0.6], dtype=torch.float64)  # weights of both signs


@pytest.mark.parametrize("seed", [0, 1, 5, 8])  # in others equal tokens turn for ever
def test_the_rate_is_the_derivatives_radius_for_mixed_weights_and_generic_attention(seed):
    """Constant tokens are invariant, so the derivative's part across them has the factors of the differences."""
    A = random_attention(TOKENS, 1.0, seed=seed)
    H = 0.5 * torch.eye(WIDTH, dtype=torch.float64) + 0.3 * normal(WIDTH, WIDTH, seed=seed + 100)
    mu = torch.linalg.eigvals(A)
    found = post_norm(H, mu, MIXED)

    def layer(x):
        return torch.nn.functional.layer_norm(x + A @ x @ H.mT, (WIDTH,), MIXED, eps=1e-12)

    equal = found.token.expand(TOKENS, -1)
    torch.testing.assert_close(layer(equal), math.copysign(1, found.gain) * equal)
    derivative = torch.autograd.functional.jacobian(layer, equal)
    across = torch.linalg.svd(torch.ones(1, TOKENS, dtype=torch.float64)).Vh[1:]
    part = torch.einsum("ai,icjd,bj->acbd", across, derivative, across).reshape(2 * [(TOKENS - 1) * WIDTH])
    assert torch.linalg.eigvals(part).abs().max().item() == pytest.approx(found.rate, rel=1e-6)
    if seed > 0:  # with a lead over the other modes that 400 layers show
        assert mu.imag.abs().max() > 1e-3
        assert_reached(found, H, A, MIXED, layers=400, spread=1e-4)


def test_post_norm_can_smooth_where_no_layer_without_a_norm_can():
    A, (H, _) = lazy(), centred_branch([-0.1, -1.0, -1.0, -1.0])
    mu = torch.linalg.eigvals(A)
    assert theory.cannot_smooth(torch.tensor([-0.1, -1.0, -1.0, -1.0]))
    assert theory.ratio_rate(centred_spectrum(H), mu) > 1
    found = post_norm(H, mu)
    assert found.rate == pytest.approx(0.5 / 0.9)
    assert repeat(near(found.token), H.mT, A, layers=60, norm="post").converged(1e-9)["input"]
    turn = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = -5.0, 5.0
    with pytest.raises(AcutanceError, match="complex"):  # a token that turns has no limit
        post_norm(turn, mu)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused(value):
    """LAPACK would take the interpreter down with it."""
    H, mu = torch.eye(WIDTH, dtype=torch.float64), torch.linalg.eigvals(lazy())
    H[0, 1] = value
    refused = [lambda: centred_spectrum(H), lambda: post_norm(H, mu), lambda: post_norm(0 * H.nan_to_num(), mu * value)]
    for read in refused:
        with pytest.raises(NonFiniteError, match="holds NaN or infinite entries"):
            read()


# Post-LN: why the spectra do not decide the limit


SIGNS = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)


def test_the_same_layer_leads_to_equal_tokens_or_to_two_groups_depending_on_the_start():
    A, (H, vectors) = lazy(), centred_branch([0.5, -0.5, -0.5, -0.6])
    v, others = math.sqrt(WIDTH) * vectors[:, 0], torch.tensor([-0.5, -0.5, -0.6])
    assert post_norm(H, torch.linalg.eigvals(A)).rate < 1
    for signs in (torch.ones_like(SIGNS), SIGNS):
        rate = groups_rate(A, 0.5, others, signs)
        assert rate < 1
        path = repeat(signs[:, None] * v + 1e-3 * normal(TOKENS, WIDTH, seed=3), H.mT, A, layers=200, norm="post")
        torch.testing.assert_close(path.last, signs[:, None] * v, rtol=0, atol=1e-9)
        assert path.converged() == {"input": signs.min() > 0, "angle": signs.min() > 0, "rank": True}


@pytest.mark.parametrize(
    ("lam", "signs", "stays"),
    [(0.9, SIGNS, True), (-0.9, SIGNS, True), (3.0, SIGNS, False), (-3.0, SIGNS.abs(), True)],
)
def test_groups_stay_exactly_where_no_factor_changes_its_sign(lam, signs, stays):
    A = random_attention(TOKENS, 0.5, seed=2)
    H, vectors = centred_branch([lam, 0.0, 0.0, 0.0])
    start = math.sqrt(WIDTH) * signs[:, None] * vectors[:, 0]
    rate = groups_rate(A, lam, torch.zeros(3), signs)
    assert math.isfinite(rate) == stays
    after = repeat(start, H.mT, A, layers=1, norm="post").last
    assert torch.allclose(after.abs(), start.abs(), atol=1e-9)
    assert (torch.allclose(after, start, atol=1e-9) or torch.allclose(after, -start, atol=1e-9)) == stays


@pytest.mark.parametrize("seed", range(3))
def test_deviations_from_the_groups_change_at_their_rate(seed):
    A = random_attention(TOKENS, 0.6, symmetric=True, seed=seed)
    H, vectors = centred_branch([0.3, -0.5, -0.5, -0.6])
    start = math.sqrt(WIDTH) * SIGNS[:, None] * vectors[:, 0] + 1e-6 * normal(TOKENS, WIDTH - 1, seed=3) @ vectors.mT
    ends = (repeat(start, H.mT, A, layers=layers, norm="post").last for layers in (40, 60))
    before, after = (float((x @ vectors[:, 1:]).norm()) for x in ends)
    rate = groups_rate(A, 0.3, torch.tensor([-0.5, -0.5, -0.6]), SIGNS)
    assert (after / before) ** (1 / 20) == pytest.approx(rate, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), lam=st.floats(0.05, 5), sharp=st.floats(0.1, 3))
def test_with_one_positive_eigenvalue_angles_within_a_right_one_never_grow(seed, lam, sharp):
    """x_i + λ Σ A_ij x_j is a mean of unit tokens times 1 + λ: products stay ≥ c ≥ 0 and sizes ≤ 1, so cosines ≥ c."""
    H = lam * torch.eye(WIDTH, dtype=torch.float64)
    x = normal(1, WIDTH, seed=seed) + 0.4 * normal(TOKENS, WIDTH, seed=seed + 1)
    first = repeat(x, 0 * H, random_attention(TOKENS), layers=1, norm="post").last
    path = repeat(first, H, random_attention(TOKENS, sharp, seed=seed), layers=30, norm="post").min_cosine[0]
    assume(path[0] >= 0)
    assert (np.diff(path) >= -1e-12).all()


@given(seed=st.integers(0, 999), tokens=st.integers(2, 9))
def test_for_tokens_of_one_size_input_and_angle_say_the_same(seed, tokens):
    x = normal(tokens, 4, seed=seed)
    x = 3 * x / x.norm(dim=-1, keepdim=True)
    found = ratio_at_equal_size(metrics.token_cosine(x).item(), tokens)
    assert found == pytest.approx(metrics.hfc_lfc_frobenius(x).item(), rel=1e-6)
