"""The statements of https://arxiv.org/abs/2401.04301, each against something computed another way."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layers import TOKENS, WIDTH, centred_branch, normal

from acutance import metrics
from acutance.errors import AcutanceError
from acutance.explain import spectral_theory as theory
from acutance.lab.studies import branch_with_spectrum, random_attention, repeat
from attention.operator_cases import assert_same_set

real = st.floats(-3, 3, allow_nan=False)
unit = st.floats(-0.99, 0.99, allow_nan=False)
ROOT = Path(__file__).parents[3]


def spectrum(low, high, width=WIDTH):
    return torch.linspace(low, high, width, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_the_matrix_is_the_layer_and_its_spectrum_is_one_plus_all_products(seed):
    A, H = random_attention(TOKENS, 2.0, seed=seed), normal(WIDTH, WIDTH, seed=seed)
    predicted = theory.layer_eigenvalues(torch.linalg.eigvals(H), torch.linalg.eigvals(A))
    assert predicted.imag.abs().max() > 0.01, "complex eigenvalues are meant to be part of this"
    brute = torch.linalg.eigvals(theory.layer_matrix(A, H))
    assert_same_set(predicted.flatten(), brute.numpy(), 1e-7)
    x = normal(TOKENS, WIDTH, seed=3)
    after = theory.layer_matrix(A, H.mT) @ x.mT.reshape(-1)  # a transposed view
    torch.testing.assert_close(after, (x + A @ x @ H).mT.reshape(-1), rtol=0, atol=1e-12)


@given(lam=st.lists(real, min_size=1, max_size=6), mu=st.lists(unit, min_size=1, max_size=6))
def test_only_the_ends_of_a_real_spectrum_can_dominate(lam, mu):
    mus = torch.tensor([*mu, 1.0], dtype=torch.float64)
    gains = theory.layer_eigenvalues(torch.tensor(lam, dtype=torch.float64), mus).abs()
    ends = gains[:, [int(mus.argmin()), len(mu)]].amax(1)
    assert (ends >= gains.amax(1) - 1e-12).all()
    found = theory.dominance(torch.tensor(lam, dtype=torch.float64), mus)
    assert found.gain == pytest.approx(float(ends.max()), abs=1e-12)


def test_a_complex_mu_between_the_real_ends_may_dominate():
    mu = torch.tensor([1.0, -0.2, 0.1 + 0.9j, 0.1 - 0.9j], dtype=torch.complex128)
    assert abs(theory.dominance(torch.tensor([-1.0 + 0j]), mu).mu.imag) == pytest.approx(0.9)


def away_from(x, limit):
    """The part of x/‖x‖ across the limit's direction."""
    unit = x / x.norm()
    return (unit - (unit * limit).sum() * limit).norm()


@pytest.mark.parametrize("ends", [(0.1, 1.0), (-1.0, -0.1), (-4.0, -3.0), (-1.0, 0.5)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tokens_go_to_the_predicted_limit_at_the_predicted_rate(ends, symmetric):
    # Symmetric attention has real μ > 0; of the others this seed's smallest μ is real and negative.
    A = random_attention(TOKENS, 0.6 if symmetric else 1.2, symmetric=symmetric, seed=4)
    H, family = branch_with_spectrum(spectrum(*ends), seed=1), "varying" if ends == (-1.0, -0.1) else "constant"
    lam, mu = torch.linalg.eigvals(H), torch.linalg.eigvals(A)
    found = theory.dominance(lam, mu)
    assert found.family == family
    limit = theory.limit(A, H)
    thousandth = math.ceil(math.log(1e-3) / math.log(found.rate))  # so many layers bring it a thousand times closer
    early = repeat(normal(TOKENS, WIDTH, seed=9), H.mT, A, layers=thousandth).last
    late = repeat(early, H.mT, A, layers=thousandth).last
    assert away_from(early, limit) < 0.1
    measured = float((away_from(late, limit) / away_from(early, limit)) ** (1 / thousandth))
    assert math.log(measured) == pytest.approx(math.log(found.rate), rel=0.05)
    if family == "constant":
        torch.testing.assert_close(limit, limit[:1].expand_as(limit), rtol=0, atol=1e-9)
    ratio = metrics.hfc_lfc_spectral(limit).item()
    assert ratio == pytest.approx(theory.limit_ratio(limit[:, limit[0].abs().argmax()]), abs=1e-9)
    assert (ratio < 1e-9) == (found.family == "constant") == (theory.ratio_rate(lam, mu) < 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_ratio_falls_at_the_smoothing_rate_also_for_complex_spectra(seed):
    A, H = random_attention(TOKENS, 1.5, seed=seed), 0.6 * normal(WIDTH, WIDTH, seed=seed) + 0.5 * torch.eye(WIDTH)
    lam, mu = torch.linalg.eigvals(H), torch.linalg.eigvals(A)
    assert min(lam.imag.abs().max(), 5 * mu.imag.abs().max()) > 0.05
    rate = theory.ratio_rate(lam, mu)
    assert rate < 1
    # A complex pair makes the ratio swing about its line, so many layers are needed: more than rounding leaves of a
    # falling ratio. The layer is linear, so what falls is brought up again every few layers, and the factor kept.
    x, fallen, segments, layers = normal(TOKENS, WIDTH, seed=9), 0.0, 200, 10
    for segment in range(segments):
        path = repeat(x, H.mT, A, layers=layers)
        if segment >= segments // 2:  # the modes that are not the largest have died out
            fallen += math.log(path.hfc_lfc[0, -1] / path.hfc_lfc[0, 0])
        low = path.last.mean(0, keepdim=True).expand(TOKENS, WIDTH)
        high = path.last - low
        x = low / low.norm() + 1e-3 * high / high.norm()
    measured = fallen / (layers * (segments - segments // 2))
    assert measured == pytest.approx(math.log(rate), rel=0.01)


def test_ties_are_no_family_and_have_no_limit():
    A = random_attention(TOKENS, 0.6, symmetric=True, seed=4)
    mu = torch.linalg.eigvals(A)
    H = theory.sharpening_bound(float(mu.real.min())) * torch.eye(WIDTH, dtype=torch.float64)
    for tied in (H, torch.zeros_like(H)):
        assert theory.dominance(torch.linalg.eigvals(tied), mu).family == "neither"
        assert not theory.layer_smooths(torch.linalg.eigvals(tied), float(mu.real.min()))
        with pytest.raises(AcutanceError, match="ties with another"):
            theory.limit(A, tied)
    turn = torch.tensor([[0.5, -0.5], [0.5, 0.5]], dtype=torch.float64)  # a conjugate pair ties with itself
    assert theory.dominance(torch.linalg.eigvals(turn), mu).rate == pytest.approx(1)
    assert theory.ratio_rate(torch.linalg.eigvals(turn), mu) < 1
    with pytest.raises(AcutanceError, match="complex"):
        theory.limit(A, turn)
    # One token is a tie by itself, and its limit an eigenvector.
    lam, alone = spectrum(-0.9, -0.5), torch.ones(1, dtype=torch.float64)
    found, H = theory.dominance(lam, alone), branch_with_spectrum(lam)
    assert (found.family, found.mu, theory.ratio_rate(lam, alone)) == ("neither", 1, 1)
    limit = theory.limit(alone[None], H)
    torch.testing.assert_close(limit @ H, (found.gain - 1) * limit, rtol=0, atol=1e-12)


@given(mu=st.lists(unit, min_size=1, max_size=6), place=st.integers(0, 6))
def test_the_others_are_all_but_the_constant_mode(mu, place):
    place = min(place, len(mu))
    values = torch.tensor([*mu[:place], 1.0, *mu[place:]], dtype=torch.float64)
    assert int(theory.constant_mode(values)) == place
    assert theory.other_eigenvalues(values).tolist() == mu
    assert theory.other_eigenvalues(values.expand(2, 3, -1)).tolist() == [[mu] * 3] * 2


@given(re=real, im=st.just(0.0) | real, mu=unit)
@example(re=-2.0, im=0.0, mu=-0.5)
def test_the_exact_condition(re, im, mu):
    """The λ fill the open disc over [−2/(1 + μ), 0], real ones the interval itself."""
    lam, centre = complex(re, im), theory.sharpening_bound(mu) / 2
    if abs(abs(lam - centre) + centre) > 1e-9:
        beats = theory.beats_constant(*torch.tensor([lam, mu], dtype=torch.complex128))
        assert beats == (abs(lam - centre) < -centre)


@given(lam=st.lists(st.tuples(real, real), min_size=1, max_size=6), mu=unit)
def test_beyond_the_bound_is_where_brute_force_says(lam, mu):
    """Complex λ: |1 + λ| against |1 + λμ_min|, one by one, in Python's own arithmetic."""
    values = torch.tensor([complex(*pair) for pair in lam], dtype=torch.complex128)
    leads = {z: abs(1 + z) ** 2 - abs(1 + z * mu) ** 2 for z in values.tolist()}
    tie = 1e-6 * max(map(abs, leads))
    beyond = dict(zip(values.tolist(), theory.beyond_bound(values, mu).tolist(), strict=True))
    for z, lead in leads.items():
        if abs(lead - tie) > 1e-12 + 1e3 * tie**2 and abs(z.real - tie) > 1e-12:
            assert beyond[z] == (z.real <= tie and lead > tie)
    assert not theory.beyond_bound(values, mu, error=1e6 * tie).any()
    furthest = theory.furthest_beyond(values, mu)
    assert (furthest is None) == (not any(beyond.values()))
    if furthest is not None:
        assert leads[furthest] == pytest.approx(max(leads[z] for z in leads if beyond[z]), rel=1e-9, abs=1e-12)


@given(lam=st.tuples(real, real), mu=st.tuples(unit, unit), off=st.floats(0, 0.3), turn=st.floats(0, 6.28), far=unit)
def test_an_error_of_mu_is_covered_by_the_margin(lam, mu, off, turn, far):
    """If the true μ is within the residual of the one given, a leaning that is decided is the true one's."""
    true = complex(*mu) / max(1.0, abs(complex(*mu)))
    given_mu = true + off * complex(math.cos(turn), math.sin(turn))
    given_mu /= max(1.0, abs(given_mu))
    values = torch.tensor([complex(*lam)], dtype=torch.complex128)
    others, exact = (torch.tensor([m, far], dtype=torch.complex128) for m in (given_mu, true))
    found, right = theory.families(values, others, 0.0, (others - exact).abs()), theory.families(values, exact)
    if float(found.leaning) != 0:
        assert float(found.leaning) == -float(right.log_rate.sign())
    assert not right.undecided


@given(lam=st.lists(real, min_size=1, max_size=4), mu=st.lists(unit, min_size=1, max_size=4))
def test_a_layer_smooths_by_all_its_eigenvalues(lam, mu):
    values, others = torch.tensor(lam, dtype=torch.complex128) * (1 + 0.5j), torch.tensor([*mu, 1.0]).double()
    rate = theory.ratio_rate(values, others)
    if abs(math.log(rate)) > 1e-5 * float(values.abs().max()):  # nearer is a tie
        assert theory.layer_smooths(values, min(mu)) == (rate < 1)


@settings(max_examples=40, deadline=None)
@given(lam=st.lists(st.floats(-1, 0), min_size=1, max_size=5), seed=st.integers(0, 999), sharp=st.floats(0.1, 5))
def test_eigenvalues_from_minus_one_to_zero_cannot_smooth(lam, seed, sharp):
    values = torch.tensor(lam, dtype=torch.float64)
    assert theory.cannot_smooth(values)
    for others in ([-1.01, 0.0], [-0.5, 0.01], [-0.5 + 0.1j, -0.5 - 0.1j]):
        assert not theory.cannot_smooth(torch.tensor(others))
    mu = torch.linalg.eigvals(random_attention(TOKENS, sharp, seed=seed))  # complex in general
    assert theory.ratio_rate(values, mu) >= 1 - 1e-9


@given(seed=st.integers(0, 999), spread=st.floats(1e-6, 2), tokens=st.integers(2, 9))
def test_input_convergence_bounds_the_angles_and_those_the_rank(seed, spread, tokens):
    x = normal(1, 4, seed=seed) + spread * normal(tokens, 4, seed=seed + 1)
    unit = x / x.norm(dim=-1, keepdim=True)
    cosine = float((unit @ unit.mT).min())
    assert cosine >= theory.cosine_floor(metrics.hfc_lfc_spectral(x).item(), tokens) - 1e-9
    assert metrics.singular_ratio(x).item() <= theory.singular_ceiling(cosine) + 1e-6
    assert theory.cosine_floor(1e-6, 10) == pytest.approx(1, abs=1e-10)  # the bounds close in the limit
    assert theory.singular_ceiling(1.0) == 0


def test_the_converses_fail():
    direction, still = normal(1, WIDTH), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for lengths, one_way in (([1.0, 2.0, 3.0, 4.0], True), ([1.0, -1.0, 2.0, 1.0], False)):
        tokens = torch.tensor(lengths).double()[:, None] * direction
        found = repeat(tokens, still, random_attention(4, seed=0), layers=1).converged()
        assert found == {"input": False, "angle": one_way, "rank": True}


def test_negative_pre_norm_weights_turn_the_spectrum_round():
    A, x, W, gamma = random_attention(TOKENS, seed=1), normal(3, TOKENS, WIDTH), normal(WIDTH, WIDTH, seed=2), normal(5)
    kept = repeat(x, W, A, layers=30, norm="pre", norm_weight=gamma)
    folded = repeat(x, theory.fold_pre_norm(W.mT, gamma).mT, A, layers=30, norm="pre")
    torch.testing.assert_close(kept.last, folded.last, rtol=1e-8, atol=1e-8)
    sharp = repeat(x, W, A, layers=30, norm="pre", norm_weight=-1.0)
    assert torch.equal(sharp.last, repeat(x, -W, A, layers=30, norm="pre").last)


def test_negative_post_norm_weights_of_one_size_only_turn_the_tokens_round():
    A, x, W = random_attention(TOKENS, seed=1), normal(3, TOKENS, WIDTH), normal(WIDTH, WIDTH, seed=2)
    for layers in (1, 8):
        plus, minus = (repeat(x, W, A, layers=layers, norm="post", norm_weight=sign) for sign in (1.0, -1.0))
        torch.testing.assert_close(minus.last, (-1) ** layers * plus.last, rtol=0, atol=1e-9)
        np.testing.assert_allclose(minus.hfc_lfc, plus.hfc_lfc, rtol=1e-9)


@pytest.mark.parametrize("second", [0.3, 0.9])
def test_under_pre_norm_the_ratio_falls_by_a_power_law(second):
    A = random_attention(TOKENS, 0.6, symmetric=True, seed=4)
    # Of the mean over channels, which the norm removes, H makes anything; λ = 1 stands alone above the others.
    lam = torch.tensor([1.0, *[second] * (WIDTH - 2)], dtype=torch.float64)
    H, vectors = centred_branch(lam.tolist(), seed=0)
    start = 2 * vectors[:, 0] + 0.01 * normal(TOKENS, WIDTH, seed=9)
    path = repeat(start, H.mT, A, layers=3000, norm="pre").hfc_lfc[0]
    power = theory.pre_norm_power(lam, torch.linalg.eigvals(A).real)
    assert math.log2(path[3000] / path[1500]) == pytest.approx(power, abs=0.03)
    with pytest.raises(AcutanceError, match="do not grow"):
        theory.pre_norm_power(spectrum(-1, -0.1), torch.tensor([1.0, 0.5]))


def test_a_statement_has_a_function_and_a_test():
    """The page that says which stand for a statement names only what is there."""
    table = (ROOT / "docs" / "laboratory.md").read_text(encoding="utf-8").split("## Each statement")[1]
    code = "".join(path.read_text("utf-8") for room in ("src", "tests") for path in (ROOT / room).rglob("*.py"))
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for statement, functions, tests in rows:
        named = re.findall(r"`([\w./]+)`", f"{functions} {tests}")
        assert any("test" in name for name in named), statement
        for name in named:
            assert (ROOT / name).exists() or re.search(rf"(def|class) {name.split('.')[-1]}\b", code), name
