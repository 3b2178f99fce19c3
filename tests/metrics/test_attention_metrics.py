"""Metrics of attention, energies included, against dense formulas in float64; laws, edge cases, precision, memory."""

import math
from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from acutance.attention import AttentionCall, products
from acutance.attention.operator import AttentionOperator
from acutance.errors import ShapeError
from acutance.metrics.attention import attention_cosine, attention_entropy, head_cosine
from acutance.metrics.energy import energy, fidelity, gradient_alignment, log_nonlocal_energy_raw, nonlocal_energy
from acutance.metrics.sums import ATTENTION_METRICS, MEANINGS, TOKEN_METRICS
from attention.operator_cases import KERNELS, MASKINGS, LargestTensor, formula, make_case, normal, with_heads

laws = settings(max_examples=20, deadline=None, derandomize=True)
ENERGIES = {m.__name__: m for m in (nonlocal_energy, log_nonlocal_energy_raw, gradient_alignment)}
METRICS = {  # as functions of one operator, tokens and query rows
    **ENERGIES,
    "attention_entropy": lambda A, u, rows=None: attention_entropy(A, rows),
    "attention_cosine": lambda A, u, rows=None: attention_cosine(A, A.symmetrised(), rows),
    "head_cosine": lambda A, u, rows=None: head_cosine(A, rows),
}
ALL = pytest.mark.parametrize("name", METRICS)
COMBINATIONS = [(kernel, masking) for kernel in KERNELS for masking in MASKINGS]
COMBINATIONS += [(kernel, "bias") for kernel in ("softmax", "symmetric", "rbf")]
HALF = torch.rand(2, 11, generator=torch.Generator().manual_seed(3)) > 0.4  # of the cases' rows


def written_out(c, rows):
    """Every metric of a case by dense sums over the rows that count."""
    (weights, sums), rows = c.expected, rows[:, None, :, None]
    symmetric, symmetric_sums = formula(with_heads(c.k, 4), c.k, **c.options)
    sees, u, v = (sums > -torch.inf)[..., None], c.y, c.values
    squares = (u[..., :, None, :] - u[..., None, :, :]).square().sum(-1)
    kernel, other = weights * sums.exp()[..., None], symmetric * symmetric_sums.exp()[..., None]
    one, two = (k.sum(-1, keepdim=True) * v - k @ v for k in (kernel, other))
    counted = (rows & sees).squeeze(-1)
    count = counted.sum(-1).clamp_min(1)
    fixed, cosine = (weights * rows).flatten(2), partial(torch.cosine_similarity, dim=-1, eps=1e-30)
    pairs = [cosine(fixed[:, g], fixed[:, h]) for g, h in combinations(range(4), 2)]
    return {
        "nonlocal_energy": (rows * weights * squares).sum((-2, -1)) / 2,
        "log_nonlocal_energy_raw": ((rows * kernel * squares).sum((-2, -1)) / 2).log(),
        "gradient_alignment": (cosine(one, two) * counted).sum(-1) / count,
        "attention_entropy": (torch.special.entr(weights).sum(-1) * counted).sum(-1) / count,
        "attention_cosine": cosine(fixed, (symmetric * rows).flatten(2)),
        "head_cosine": torch.stack(pairs).mean(0),
    }


@pytest.mark.parametrize(("kernel", "masking"), COMBINATIONS)
@pytest.mark.parametrize("grouped", [False, True])
def test_every_metric_is_the_sum_written_out(kernel, masking, grouped, tiles):
    c = make_case(kernel, masking, grouped)
    for rows in (torch.ones_like(HALF), HALF):
        for name, expected in written_out(c, rows).items():
            value = METRICS[name](c.operator, c.x if name == "gradient_alignment" else c.y, rows)
            assert_close(value, expected, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
            lowest, highest = MEANINGS[name].range
            assert ((lowest <= value) & (value <= highest)).all()
    assert {**METRICS, **TOKEN_METRICS}.keys() == MEANINGS.keys()


@pytest.mark.parametrize("strength", [0.6, torch.tensor([0.1, 0.2, 0.3, 0.4])], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_energy_adds_the_weighted_sum_of_squares(strength, masked):
    c = make_case("softmax", "causal", grouped=True)
    kept = HALF if masked else torch.ones_like(HALF)
    expected = strength / 2 * ((c.y - c.values).square().sum(-1) * kept[:, None]).sum(-1)
    spoilt = c.y.masked_fill(~kept[:, None, :, None], math.nan)
    assert_close(fidelity(spoilt, c.x, strength, HALF if masked else None), expected)
    assert_close(energy(c.operator, c.y, c.x, strength, kept), nonlocal_energy(c.operator, c.y, kept) + expected)
    for metric in ENERGIES.values():  # grouped values count once per query head
        assert torch.equal(metric(c.operator, c.x), metric(c.operator, c.values))


def test_cosines_do_not_see_a_sink_that_takes_nearly_all():
    q, k = normal(2, 2, 3, 7, 4, dtype=torch.float32)
    low, high = (AttentionOperator(q, k, sink=torch.full((3,), sink)) for sink in (15.0, 60.0))
    assert_close(head_cosine(high), head_cosine(low), rtol=1e-4, atol=0)
    assert_close(attention_cosine(high, low), torch.ones(2, 3), rtol=1e-4, atol=0)


@laws
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(0.01, 100))
def test_energies_do_not_see_offset_rotation_or_order_and_know_their_scale(seed, factor):
    A, u = AttentionOperator(*normal(2, 2, 3, 7, 4, seed=seed)), normal(2, 3, 7, 5, seed=seed + 1)
    Q, offset = torch.linalg.qr(normal(5, 5, seed=seed + 2)).Q, normal(1, 1, 1, 5, seed=seed + 3)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    shuffled = AttentionOperator(A.q[..., order, :], A.k[..., order, :])
    for name, metric in ENERGIES.items():
        value = metric(A, u)
        assert_close(metric(A, u @ Q + offset), value)
        assert_close(metric(shuffled, u[..., order, :]), value)
        scaled = {"nonlocal_energy": factor**2 * value, "log_nonlocal_energy_raw": value + 2 * math.log(factor)}
        assert_close(metric(A, factor * u), scaled.get(name, value))


@pytest.mark.parametrize("kernel", ["softmax", "rbf", "linear", "polynomial"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_alignment_is_one_when_queries_are_keys(kernel, causal):
    """The first of n causal rows sees itself alone: it counts, with cosine 0."""
    k, v = normal(2, 2, 3, 5, 4)
    found = gradient_alignment(AttentionOperator(k, k, kernel=kernel, causal=causal), v)
    assert_close(found, torch.full((2, 3), 0.8 if causal else 1.0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_energy_is_zero_exactly_for_tokens_constant_on_what_is_connected(dtype):
    q, k = normal(2, 1, 2, 8, 4, dtype=dtype)
    first = torch.arange(8) < 3
    A, connected = AttentionOperator(q, k, mask=first[:, None] == first), AttentionOperator(q, k)
    u = torch.where(first[:, None], normal(1, 2, 1, 4, seed=1), normal(1, 2, 1, 4, seed=2)).to(dtype)
    assert (nonlocal_energy(A, u) <= 100 * torch.finfo(dtype).eps * u.square().sum((-2, -1))).all()
    assert (log_nonlocal_energy_raw(A, u) == -math.inf).all()
    moved = u.clone()
    moved[..., 0, :] += 1
    for other, tokens in ((connected, u), (A, moved)):
        assert (nonlocal_energy(other, tokens) > 0.01).all()
        assert (log_nonlocal_energy_raw(other, tokens) > -5).all()


@pytest.mark.parametrize("seed", range(5))
def test_rounding_pushes_no_value_out_of_its_range(seed):
    # Eight groups of tokens far apart, constant inside: what is left of ‖u_i‖² − … is rounding of either sign.
    group = torch.arange(24) % 8
    q, k = normal(2, 1, 8, 24, 4, seed=seed, dtype=torch.float32)
    u = 100 * normal(1, 8, 8, 5, seed=seed + 100, dtype=torch.float32)[:, :, group]
    A = AttentionOperator(q, k, mask=(group[:, None] == group)[None, None])
    assert (nonlocal_energy(A, u) >= 0).all()
    assert (gradient_alignment(A, u) == 0).all()
    assert (attention_cosine(A, A) <= 1).all()
    twice = AttentionOperator(*(x[:, :1].expand(1, 2, -1, -1) for x in (q, k)))
    assert head_cosine(twice) <= 1
    sharp = AttentionOperator(20 * normal(1, 64, 1, 16, seed=seed).float(), 20 * normal(1, 64, 40, 16).float())
    assert (attention_entropy(sharp) >= 0).all()


def test_entropy_does_not_see_where_the_keys_start():
    q, k = normal(2, 2, 3, 30, 8)
    value = attention_entropy(AttentionOperator(q, k))
    assert_close(attention_entropy(AttentionOperator(q, k + 5 * normal(8, seed=1))), value)
    # With a bias the entropy comes from the entries, without one from an identity.
    zero = torch.zeros(1, 1, 30, 30, dtype=torch.float64)
    assert_close(attention_entropy(AttentionOperator(q, k, mask=zero)), value)
    A = AttentionOperator(q[..., :3, :], k, causal=True)  # more keys than queries
    assert_close(attention_entropy(A), torch.special.entr(A.dense()).sum(-1).mean(-1))
    # The same offset in every key adds up to 10⁵ to the logits of a row and nothing to its entropy.
    q, far = q.float(), k.float() + 2**16
    exact = attention_entropy(AttentionOperator(q.double(), far.double()))
    assert_close(attention_entropy(AttentionOperator(q, far)).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_heads_that_are_alone_or_disjoint(dtype):
    q, k = normal(2, 2, 2, 6, 4, dtype=dtype)
    itself = torch.eye(6, dtype=torch.bool)
    disjoint = AttentionOperator(q, k, mask=torch.stack([itself, ~itself])[None])
    for A, cosine in ((AttentionOperator(q[:, :1], k[:, :1]), 1.0), (disjoint, 0.0)):
        value = head_cosine(A)
        assert value.tolist() == [cosine, cosine]
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("case", ["constant", "one token", "all rows dropped", "all keys masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edge_cases(case, dtype):
    n = 1 if case == "one token" else 6
    q, k, u = normal(3, 1, 2, n, 4, dtype=dtype)
    u = (u[..., :1, :].expand_as(u) if case == "constant" else u).clone().requires_grad_()
    nothing = torch.zeros(1, n, dtype=torch.bool)
    A = AttentionOperator(q, k, mask=nothing if case == "all keys masked" else None)
    rows = nothing if case == "all rows dropped" else None
    values = {name: metric(A, u, rows) for name, metric in METRICS.items()}
    assert_close(values["nonlocal_energy"], torch.zeros(1, 2, dtype=dtype), atol=1e-10, rtol=0)
    assert (values["gradient_alignment"] == 0).all()
    assert (values["log_nonlocal_energy_raw"] == -math.inf).all()
    if case.startswith("all"):
        assert all((values[name] == 0).all() for name in ("attention_entropy", "attention_cosine", "head_cosine"))
    (values["nonlocal_energy"] + values["gradient_alignment"]).sum().backward()
    assert torch.isfinite(u.grad).all()


@ALL
@pytest.mark.parametrize("biased", [False, True])
def test_a_nan_is_not_hidden(name, biased):
    A = AttentionOperator(*normal(2, 2, 3, 7, 4), mask=torch.zeros(7, 7).double() if biased else None)
    u = normal(2, 3, 7, 5, seed=1)
    A.q[1, 2, 3, 0] = math.nan
    assert METRICS[name](A, u).isnan().nonzero().tolist() == ([[1]] if name == "head_cosine" else [[1, 2]])
    if name in ENERGIES:
        u[0, 1, 3, 0] = math.nan
        assert METRICS[name](A, u).isnan().nonzero().tolist() == [[0, 1], [1, 2]]


def test_what_does_not_fit_is_refused():
    q, k = normal(1, 2, 3, 4), normal(1, 2, 5, 4)
    A = AttentionOperator(k, k)
    for metric in ENERGIES.values():
        with pytest.raises(ShapeError, match="3 queries and 5 keys"):
            metric(AttentionOperator(q, k), k)
        with pytest.raises(ShapeError, match=r"\(1, 2, 6, 4\) do not fit.*\(1, 2, 5, any\)"):
            metric(A, normal(1, 2, 6, 4))
        with pytest.raises(ShapeError, match=r"a mask \(1, 4\)"):
            metric(A, k, torch.ones(1, 4, dtype=torch.bool))
    for f in (q, k[0]):
        with pytest.raises(ShapeError, match=r"give the same \(batch, heads, tokens, channels\)"):
            fidelity(k, f, 0.6)
    with pytest.raises(ShapeError, match=r"\(1, 2, 5, 5\) and \(1, 1, 5, 5\)"):
        attention_cosine(A, AttentionOperator(k[:, :1], k[:, :1]))


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_input_costs_only_its_own_rounding(name, dtype):
    q, k, u = normal(3, 2, 2, 48, 8, dtype=dtype)
    for tokens in (u, (1e3 + 1e-3 * u.double()).float()):  # the second are nearly constant
        value = METRICS[name](AttentionOperator(q, k), tokens)
        assert value.dtype == torch.float32
        exact = METRICS[name](AttentionOperator(q.double(), k.double()), tokens.double())
        assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(METRICS[name](AttentionOperator(q, k), tokens), value)


@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "rbf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_stay_finite(kernel, dtype):
    q, k, u = normal(3, 1, 3, 12, 4) * torch.tensor([100, 100, 1]).view(3, 1, 1, 1, 1)
    one = k if kernel == "symmetric" else q
    logs = -0.25 * torch.cdist(one, k).square() if kernel == "rbf" else 0.5 * one @ k.mT
    assert logs.abs().max() > 1e4, "exp is meant to overflow and underflow"
    expected = (logs + (torch.cdist(u, u).square() / 2).log()).flatten(2).logsumexp(-1)
    A = AttentionOperator(q.to(dtype), k.to(dtype), kernel=kernel)
    value = log_nonlocal_energy_raw(A, u.to(dtype))
    assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(metric(A, u.to(dtype))).all() for metric in (nonlocal_energy, gradient_alignment))


@ALL
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kernel": "linear"}, {"kernel": "rbf"}], ids=str)
def test_gradients_are_right(name, options, tiles):
    inputs, rows = [x.requires_grad_() for x in normal(3, 1, 2, 5, 3)], torch.tensor([[True, True, False, True, True]])
    assert torch.autograd.gradcheck(lambda q, k, u: METRICS[name](AttentionOperator(q, k, **options), u, rows), inputs)


def test_gradients_of_the_fidelity_and_past_rows_that_see_nothing():
    q, k, u = (x.requires_grad_() for x in normal(3, 1, 2, 5, 3))
    strength = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fidelity, (u, q, strength))
    A = AttentionOperator(q, k, mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(-1))  # row 0 sees no key
    sum(metric(A, u) for metric in ENERGIES.values()).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, u))


def record_of(A, v, u):
    return AttentionCall(operator=A, v=v, values=v, output=u, branch=u)


def test_attention_metrics_read_the_right_part_of_a_record():
    c = make_case("softmax", "keys", grouped=True)
    assert {*ATTENTION_METRICS, "attention_cosine"} == {*METRICS}
    for name, metric in ATTENTION_METRICS.items():
        found = metric(record_of(c.operator, c.x, c.y), HALF)
        assert torch.equal(found, METRICS[name](c.operator, c.x if name == "gradient_alignment" else c.y, HALF))
        assert found.shape in {(2,), (2, 4)}


READ = {
    **{name: lambda record, metric=metric: metric(record, None) for name, metric in ATTENTION_METRICS.items()},
    "attention_cosine": lambda record: attention_cosine(record.A, record.A),
    **{name: lambda record, metric=metric: metric(record.output, None) for name, metric in TOKEN_METRICS.items()},
}


@pytest.mark.parametrize("kernel", ["softmax", "polynomial"])
@pytest.mark.parametrize("name", READ)
def test_nothing_as_large_as_the_attention_matrix_is_made(name, kernel, monkeypatch):
    n = 2048
    monkeypatch.setattr(products, "CPU_TILE", n * 128)
    q, k, u = normal(3, 1, 2, n, 4, dtype=torch.float32)
    with torch.no_grad(), LargestTensor() as largest:
        READ[name](record_of(AttentionOperator(q, k, kernel=kernel), u, u))
    assert 0 < largest.elements <= n * 128


@pytest.mark.cuda
@pytest.mark.parametrize("name", READ)
def test_cuda_agrees_with_float64_on_the_cpu(name):
    def value(device, dtype):
        q, k, u = normal(3, 2, 2, 197, 64, dtype=torch.float32).to(device, dtype)
        return READ[name](record_of(AttentionOperator(q, k), u, u)).double().cpu()

    assert_close(value("cuda", torch.float32), value("cpu", torch.float64), rtol=1e-4, atol=1e-5)
