"""The energies against double sums in float64; their laws, precision and gradients."""

import math

import metric_oracles as oracles
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_worlds import COMBINATIONS, world

from acutance.attention.operator import AttentionOperator
from acutance.errors import ShapeError
from acutance.metrics import energy, fidelity, gradient_alignment, log_nonlocal_energy_raw, nonlocal_energy

EVERYWHERE = pytest.mark.parametrize(("kernel", "mask", "key_heads"), COMBINATIONS)
BOTH = pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw], ids=lambda m: m.__name__)
laws = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_operator(tokens=7, seed=0, **options):
    q, k = random(2, 2, 3, tokens, 4, seed=seed)
    return AttentionOperator(q, k, **options)


def keep(rows, x):
    """x with zeros (or −inf, for logs) in the query rows that do not count."""
    return np.where(rows[:, None], x, 0)


@EVERYWHERE
def test_nonlocal_energy_is_the_double_sum(kernel, mask, key_heads):
    w = world(kernel, mask, key_heads)
    weights, u = w.weights, w.u.numpy()
    expected = w.per_head(lambda b, h: oracles.nonlocal_energy(weights[b, h], u[b, h]))
    torch.testing.assert_close(nonlocal_energy(w.A, w.u), expected, rtol=1e-9, atol=1e-12)
    rows = w.rows.numpy()
    expected = w.per_head(lambda b, h: oracles.nonlocal_energy(keep(rows[b], weights[b, h]), u[b, h]))
    torch.testing.assert_close(nonlocal_energy(w.A, w.u, w.rows), expected, rtol=1e-9, atol=1e-12)


@EVERYWHERE
def test_log_nonlocal_energy_raw_is_the_log_of_the_double_sum(kernel, mask, key_heads, tile_rows):
    w = world(kernel, mask, key_heads)
    u, rows = w.u.numpy(), w.rows.numpy()
    expected = w.per_head(lambda b, h: oracles.log_nonlocal_energy_raw(w.logs[b, h], u[b, h]))
    torch.testing.assert_close(log_nonlocal_energy_raw(w.A, w.u), expected, rtol=1e-9, atol=1e-9)

    def rows_only(b, h):
        return oracles.log_nonlocal_energy_raw(np.where(rows[b][:, None], w.logs[b, h], -math.inf), u[b, h])

    expected = w.per_head(rows_only)
    torch.testing.assert_close(log_nonlocal_energy_raw(w.A, w.u, w.rows), expected, rtol=1e-9, atol=1e-9)


@EVERYWHERE
def test_gradient_alignment_is_the_cosine_of_two_sums(kernel, mask, key_heads):
    w = world(kernel, mask, key_heads)
    group = w.logs.shape[1] // key_heads
    for rows in (torch.ones_like(w.rows), w.rows):
        expected = w.per_head(
            lambda b, h, rows=rows: oracles.gradient_alignment(
                w.logs[b, h], w.symmetric_logs[b, h], w.v[b, h // group].numpy(), np.flatnonzero(rows[b])
            )
        )
        torch.testing.assert_close(gradient_alignment(w.A, w.v, rows), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment])
def test_grouped_values_count_once_per_query_head(metric):
    w = world("softmax", "none", 2)
    torch.testing.assert_close(metric(w.A, w.v), metric(w.A, w.v.repeat_interleave(2, dim=1)), rtol=0, atol=0)


def test_a_query_mask_leaves_the_keys_alone():
    # Dropping row 0 of a two-token problem leaves half of the double sum, not nothing.
    A = AttentionOperator(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3))
    u = torch.tensor([[[[0.0], [2.0]]]])
    assert nonlocal_energy(A, u).item() == pytest.approx(2)
    assert nonlocal_energy(A, u, torch.tensor([[False, True]])).item() == pytest.approx(1)


# --- fidelity and the whole energy ------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.6, torch.tensor([0.6]), torch.tensor([0.1, 0.2, 0.3, 0.4])], ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_fidelity_is_the_sum_of_squares(strength, key_heads):
    w = world("softmax", "none", key_heads)
    f, per_head = w.v.numpy(), torch.as_tensor(strength, dtype=torch.float64).expand(4)
    for rows in (None, w.rows):
        counted = np.ones((2, 6), bool) if rows is None else rows.numpy()

        def by_hand(b, h, counted=counted):
            differences = (w.u[b, h, i].numpy() - f[b, h * key_heads // 4, i] for i in np.flatnonzero(counted[b]))
            return per_head[h].item() / 2 * sum(np.sum(d**2) for d in differences)

        torch.testing.assert_close(fidelity(w.u, w.v, strength, rows).double(), w.per_head(by_hand))


def test_fidelity_ignores_what_is_masked_out():
    u, f = random(1, 2, 5, 3), random(1, 2, 5, 3, seed=1)
    rows = torch.tensor([[True, True, False, True, False]])
    spoilt = u.masked_fill(~rows[:, None, :, None], math.nan)
    assert torch.equal(fidelity(spoilt, f, 0.6, rows), fidelity(u, f, 0.6, rows))


def test_energy_is_both_parts():
    w = world("softmax", "causal", 2)
    for rows in (None, w.rows):
        both = nonlocal_energy(w.A, w.u, rows) + fidelity(w.u, w.v, 0.6, rows)
        torch.testing.assert_close(energy(w.A, w.u, w.v, 0.6, rows), both)
    assert (energy(w.A, w.u, w.u, 0.6) == nonlocal_energy(w.A, w.u)).all()


# --- laws ------------------------------------------------------------------------------------------


@BOTH
@laws
@given(seed=seeds)
def test_energy_does_not_see_offset_rotation_or_order(metric, seed):
    A, u = random_operator(seed=seed), random(2, 3, 7, 5, seed=seed + 1)
    Q = torch.linalg.qr(random(5, 5, seed=seed + 2)).Q
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    shuffled = AttentionOperator(A.q[..., order, :], A.k[..., order, :])
    torch.testing.assert_close(metric(A, u + random(1, 1, 1, 5, seed=seed + 3)), metric(A, u))
    torch.testing.assert_close(metric(A, u @ Q), metric(A, u))
    torch.testing.assert_close(metric(shuffled, u[..., order, :]), metric(A, u))


@laws
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_energy_is_quadratic_in_scale(seed, factor):
    A, u = random_operator(seed=seed), random(2, 3, 7, 5, seed=seed + 1)
    torch.testing.assert_close(nonlocal_energy(A, factor * u), factor**2 * nonlocal_energy(A, u))
    shifted = log_nonlocal_energy_raw(A, u) + 2 * math.log(factor)
    torch.testing.assert_close(log_nonlocal_energy_raw(A, factor * u), shifted)


@laws
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_gradient_alignment_does_not_see_offset_rotation_or_scale(seed, factor):
    A, v = random_operator(seed=seed), random(2, 3, 7, 5, seed=seed + 1)
    Q = torch.linalg.qr(random(5, 5, seed=seed + 2)).Q
    value = gradient_alignment(A, v)
    torch.testing.assert_close(gradient_alignment(A, factor * v @ Q + random(1, 1, 1, 5, seed=seed + 3)), value)
    assert (value.abs() <= 1).all()


@pytest.mark.parametrize("kernel", ["softmax", "rbf", "linear", "polynomial"])
def test_gradient_alignment_is_one_when_queries_are_keys(kernel):
    k = random(2, 3, 7, 4)
    A = AttentionOperator(k, k, kernel=kernel)
    torch.testing.assert_close(gradient_alignment(A, random(2, 3, 7, 5, seed=1)), torch.ones(2, 3).double())


def test_gradient_alignment_is_about_the_gradient_of_the_energy():
    # With q := k, ∇_u ½ΣΣ k_ij‖u_i − u_j‖² = 2 Σ_j k_ij (u_i − u_j): the sums compared by Table 4.
    A, u = random_operator(kernel="symmetric"), random(2, 3, 7, 5, seed=1).requires_grad_()
    log_nonlocal_energy_raw(A, u).exp().sum().backward()
    kernel = A.dense() * A.logsumexp().exp()[..., None]
    expected = 2 * (kernel.sum(-1, keepdim=True) * u - kernel @ u)
    torch.testing.assert_close(u.grad, expected.detach())


def components(n, size):
    """A mask under which the first `size` tokens and the others do not see each other."""
    first = torch.arange(n) < size
    return (first[:, None] == first[None, :])[None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_energy_is_zero_exactly_for_tokens_constant_on_what_is_connected(dtype):
    q, k = random(2, 1, 2, 8, 4, dtype=dtype)
    mask = components(8, 3)
    A, connected = AttentionOperator(q, k, mask=mask), AttentionOperator(q, k)
    u = torch.where(torch.arange(8)[:, None] < 3, random(1, 2, 1, 4, seed=1), random(1, 2, 1, 4, seed=2)).to(dtype)
    size = 100 * torch.finfo(dtype).eps * u.square().sum((-2, -1))
    assert (nonlocal_energy(A, u) <= size).all()
    assert (log_nonlocal_energy_raw(A, u) == -math.inf).all()
    assert (nonlocal_energy(connected, u) > 0.01).all()
    assert (log_nonlocal_energy_raw(connected, u) > -5).all()
    u[..., 0, :] += 1
    assert (nonlocal_energy(A, u) > 0.01).all()
    assert (log_nonlocal_energy_raw(A, u) > -5).all()


@pytest.mark.parametrize("seed", range(5))
def test_rounding_leaves_no_energy_below_zero_and_no_direction_to_nothing(seed):
    # Eight groups of tokens far apart, constant inside: what is left of ‖u_i‖² − … is rounding of either sign.
    group = torch.arange(24) % 8
    q, k = random(2, 1, 8, 24, 4, seed=seed, dtype=torch.float32)
    u = 100 * random(1, 8, 8, 5, seed=seed + 100, dtype=torch.float32)[:, :, group]
    A = AttentionOperator(q, k, mask=(group[:, None] == group)[None, None])
    assert (nonlocal_energy(A, u) >= 0).all()
    assert (gradient_alignment(A, u) == 0).all()


# --- edge cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["constant", "one token", "all rows dropped", "all keys masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edge_cases(case, dtype):
    n = 1 if case == "one token" else 6
    q, k, u = random(3, 1, 2, n, 4, dtype=dtype)
    if case == "constant":
        u = u[..., :1, :].expand_as(u)
    A = AttentionOperator(q, k, mask=torch.zeros(1, n, dtype=torch.bool) if case == "all keys masked" else None)
    rows = torch.zeros(1, n, dtype=torch.bool) if case == "all rows dropped" else None
    leaves = [x.requires_grad_() for x in (u.clone(),)]
    values = nonlocal_energy(A, *leaves, rows), gradient_alignment(A, *leaves, rows)
    torch.testing.assert_close(values[0], torch.zeros(1, 2, dtype=dtype), atol=1e-10, rtol=0)
    assert (values[1] == 0).all()
    assert (log_nonlocal_energy_raw(A, *leaves, rows) == -math.inf).all()
    sum(value.sum() for value in values).backward()
    assert torch.isfinite(leaves[0].grad).all()


def test_a_row_that_sees_only_itself_has_no_gradient():
    # Causal: the first of n rows. It counts, with cosine 0, so q := k gives (n − 1)/n.
    k, v = random(1, 2, 5, 4, dtype=torch.float32), random(1, 2, 5, 4, seed=1, dtype=torch.float32)
    value = gradient_alignment(AttentionOperator(k, k, causal=True), v)
    torch.testing.assert_close(value, torch.full((1, 2), 0.8))


@pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment])
def test_a_nan_is_not_hidden(metric):
    A, u = random_operator(), random(2, 3, 7, 5, seed=1)
    u[1, 2, 3, 0] = math.nan
    assert metric(A, u).isnan().nonzero().tolist() == [[1, 2]]
    A.q[0, 1, 2, 0] = math.nan
    assert metric(A, u).isnan().nonzero().tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment])
def test_what_does_not_fit_is_refused(metric):
    q, k = random(1, 2, 3, 4), random(1, 2, 5, 4)
    with pytest.raises(ShapeError, match="3 queries and 5 keys"):
        metric(AttentionOperator(q, k), random(1, 2, 5, 4))
    with pytest.raises(ShapeError, match=r"\(1, 2, 6, 4\) do not fit.*\(1, 2, 5, any\)"):
        metric(AttentionOperator(k, k), random(1, 2, 6, 4))
    with pytest.raises(ShapeError, match=r"mask of shape"):
        metric(AttentionOperator(k, k), k, torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match="same shape"):
        fidelity(k, q, 0.6)
    with pytest.raises(ShapeError, match=r"\(batch, heads, tokens, channels\)"):
        fidelity(k, k[0], 0.6)


# --- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment])
def test_low_precision_input_costs_only_its_own_rounding(metric, dtype):
    q, k, u = random(3, 2, 2, 48, 8, dtype=dtype)
    value = metric(AttentionOperator(q, k), u)
    assert value.dtype == torch.float32
    exact = metric(AttentionOperator(q.double(), k.double()), u.double())
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(metric(AttentionOperator(q, k), u), value)


@pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment])
def test_nearly_constant_tokens_keep_their_energy(metric):
    q, k = random(2, 1, 2, 50, 8, dtype=torch.float32)
    u = (1e3 + 1e-3 * random(1, 2, 50, 8, seed=1)).float()
    exact = metric(AttentionOperator(q.double(), k.double()), u.double())
    torch.testing.assert_close(metric(AttentionOperator(q, k), u).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "rbf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_stay_finite(kernel, dtype):
    q, k, u = random(3, 1, 3, 12, 4)
    q, k = (100 * x for x in (q, k))  # logits of ±10⁴ and more: exp overflows and underflows everywhere
    logs = oracles.log_kernel_matrix(q.numpy(), k.numpy(), kernel=kernel)
    assert np.abs(logs).max() > 1e4
    expected = [oracles.log_nonlocal_energy_raw(logs[0, h], u[0, h].numpy()) for h in range(3)]
    A = AttentionOperator(q.to(dtype), k.to(dtype), kernel=kernel)
    value = log_nonlocal_energy_raw(A, u.to(dtype))
    torch.testing.assert_close(value.double(), torch.tensor([expected]).double(), rtol=1e-5, atol=1e-6)
    assert torch.isfinite(nonlocal_energy(A, u.to(dtype))).all()
    assert torch.isfinite(gradient_alignment(A, u.to(dtype))).all()


# --- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kernel": "linear"}], ids=str)
def test_gradients_are_right(metric, options, tile_rows):
    q, k, u = (x.requires_grad_() for x in random(3, 1, 2, 5, 3))
    rows = torch.tensor([[True, True, False, True, True]])
    assert torch.autograd.gradcheck(lambda q, k, u: metric(AttentionOperator(q, k, **options), u, rows), (q, k, u))


def test_gradients_of_the_fidelity_are_right():
    u, f = (x.requires_grad_() for x in random(2, 1, 2, 5, 3))
    strength = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fidelity, (u, f, strength))


def test_gradients_pass_rows_that_see_nothing():
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(-1)  # row 0 sees no key
    q, k, u = (x.requires_grad_() for x in random(3, 1, 2, 5, 3))
    A = AttentionOperator(q, k, mask=mask)
    (nonlocal_energy(A, u) + log_nonlocal_energy_raw(A, u) + gradient_alignment(A, u)).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, u))
