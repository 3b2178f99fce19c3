"""Entropy and cosines of attention matrices against dense formulas; registries; memory linear in tokens."""

import math
from itertools import combinations

import metric_oracles as oracles
import numpy as np
import pytest
import torch
from metric_worlds import COMBINATIONS, world
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance.attention import AttentionCall, products
from acutance.attention.operator import AttentionOperator
from acutance.errors import ShapeError
from acutance.metrics import (
    ATTENTION_METRICS,
    TOKEN_METRICS,
    attention_cosine,
    attention_entropy,
    gradient_alignment,
    head_cosine,
    log_nonlocal_energy_raw,
    nonlocal_energy,
)

EVERYWHERE = pytest.mark.parametrize(("kernel", "mask", "key_heads"), COMBINATIONS)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@EVERYWHERE
def test_entropy_is_that_of_the_rows(kernel, mask, key_heads, tile_rows):
    w = world(kernel, mask, key_heads)
    for rows in (torch.ones_like(w.rows), w.rows):
        expected = w.per_head(
            lambda b, h, rows=rows: oracles.attention_entropy(w.weights[b, h], np.flatnonzero(rows[b]))
        )
        torch.testing.assert_close(attention_entropy(w.A, rows), expected, rtol=1e-9, atol=1e-9)


@EVERYWHERE
def test_attention_cosine_is_that_of_the_dense_matrices(kernel, mask, key_heads, tile_rows):
    w, other = world(kernel, mask, key_heads), world("softmax", "causal", 4)
    for rows in (torch.ones_like(w.rows), w.rows):
        kept = rows.numpy()[:, None, :, None]
        a, b = w.weights * kept, other.weights * kept
        expected = w.per_head(lambda i, h, a=a, b=b: oracles.frobenius_cosine(a[i, h], b[i, h]))
        torch.testing.assert_close(attention_cosine(w.A, other.A, rows), expected)
        torch.testing.assert_close(attention_cosine(other.A, w.A, rows), expected)


@EVERYWHERE
def test_head_cosine_is_the_mean_over_pairs_of_heads(kernel, mask, key_heads, tile_rows):
    w = world(kernel, mask, key_heads)
    for rows in (torch.ones_like(w.rows), w.rows):
        a = w.weights * rows.numpy()[:, None, :, None]
        pairs = [[oracles.frobenius_cosine(a[b, g], a[b, h]) for g, h in combinations(range(4), 2)] for b in range(2)]
        torch.testing.assert_close(head_cosine(w.A, rows), torch.tensor(pairs).double().mean(1))


# --- laws and exact values -------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "rbf", "linear", "polynomial"])
def test_entropy_between_one_key_and_all(kernel):
    alike = torch.zeros(1, 2, 5, 3, dtype=torch.float64)
    uniform = attention_entropy(AttentionOperator(alike, alike, kernel=kernel))
    torch.testing.assert_close(uniform, torch.full((1, 2), math.log(5)).double())
    itself = torch.eye(5, dtype=torch.bool)[None, None]
    alone = attention_entropy(AttentionOperator(alike, alike, mask=itself, kernel=kernel))
    torch.testing.assert_close(alone, torch.zeros(1, 2).double(), atol=1e-12, rtol=0)
    q, k = random(2, 1, 2, 5, 3)
    mixed = attention_entropy(AttentionOperator(q, k, kernel=kernel))
    assert ((mixed > 0) & (mixed < math.log(5))).all()


def test_entropy_of_causal_uniform_attention():
    zeros = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    value = attention_entropy(AttentionOperator(zeros, zeros, causal=True))
    assert value.item() == pytest.approx(math.log(math.factorial(4)) / 4)


def test_entropy_does_not_see_where_the_keys_start_but_sees_their_scale():
    q, k = random(2, 2, 3, 7, 4)
    value = attention_entropy(AttentionOperator(q, k))
    torch.testing.assert_close(attention_entropy(AttentionOperator(q, k + 5 * random(1, 1, 1, 4, seed=1))), value)
    assert (attention_entropy(AttentionOperator(q, 3 * k)) < value).all()


def test_a_bias_of_nothing_changes_nothing():
    # Without a bias the entropy comes from an identity, with one from the entries.
    q, k = random(2, 2, 3, 7, 4)
    zero = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(
        attention_entropy(AttentionOperator(q, k, mask=zero)), attention_entropy(AttentionOperator(q, k))
    )


def test_cosines_of_equal_and_disjoint_attention():
    q, k = random(2, 2, 3, 6, 4)
    A = AttentionOperator(q, k)
    torch.testing.assert_close(attention_cosine(A, A), torch.ones(2, 3).double())
    itself = torch.eye(6, dtype=torch.bool)[None, None]
    apart = AttentionOperator(q, k, mask=itself), AttentionOperator(q, k, mask=~itself)
    torch.testing.assert_close(attention_cosine(*apart), torch.zeros(2, 3).double())
    same_heads = AttentionOperator(q[:, :1].expand(-1, 3, -1, -1), k[:, :1].expand(-1, 3, -1, -1))
    torch.testing.assert_close(head_cosine(same_heads), torch.ones(2).double())
    different_heads = torch.stack([itself[0, 0], ~itself[0, 0]])[None]
    disjoint = AttentionOperator(q[:, :2], k[:, :2], mask=different_heads)
    torch.testing.assert_close(head_cosine(disjoint), torch.zeros(2).double())


def test_rounding_does_not_push_a_value_out_of_its_range():
    for seed in range(30):
        q, k = random(2, 1, 1, 9, 4, seed=seed, dtype=torch.float32)
        A = AttentionOperator(q, k)
        twice = AttentionOperator(q.expand(1, 2, -1, -1), k.expand(1, 2, -1, -1))
        assert attention_cosine(A, A) <= 1
        assert head_cosine(twice) <= 1
    one_query, many_keys = random(1, 64, 1, 16, dtype=torch.float32), random(1, 64, 40, 16, dtype=torch.float32)
    assert (attention_entropy(AttentionOperator(20 * one_query, 20 * many_keys)) >= 0).all()


def test_cosines_do_not_see_the_order_of_tokens_or_heads():
    q, k, p, m = random(4, 2, 3, 6, 4)
    order, heads = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([2, 0, 1])
    A, B = AttentionOperator(q, k), AttentionOperator(p, m)
    shuffled = [AttentionOperator(x[:, :, order], y[:, :, order]) for x, y in ((q, k), (p, m))]
    torch.testing.assert_close(attention_cosine(*shuffled), attention_cosine(A, B))
    torch.testing.assert_close(head_cosine(shuffled[0]), head_cosine(A))
    torch.testing.assert_close(head_cosine(AttentionOperator(q[:, heads], k[:, heads])), head_cosine(A))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_head_is_like_itself(dtype):
    q, k = random(2, 3, 1, 6, 4, dtype=dtype)
    value = head_cosine(AttentionOperator(q, k))
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_attention_that_sees_nothing():
    q, k = random(2, 1, 2, 5, 3)
    nothing = AttentionOperator(q, k, mask=torch.zeros(1, 5, dtype=torch.bool))
    everything, no_rows = AttentionOperator(q, k), torch.zeros(1, 5, dtype=torch.bool)
    for A, rows in ((nothing, None), (everything, no_rows)):
        assert (attention_entropy(A, rows) == 0).all()
        assert (attention_cosine(A, everything, rows) == 0).all()
        assert (head_cosine(A, rows) == 0).all()


def test_more_keys_than_queries():
    q, k = random(1, 2, 3, 4), random(1, 2, 7, 4, seed=1)
    A = AttentionOperator(q, k, causal=True)
    dense = A.dense()
    torch.testing.assert_close(attention_entropy(A), -(torch.special.xlogy(dense, dense)).sum(-1).mean(-1))
    torch.testing.assert_close(attention_cosine(A, A), torch.ones(1, 2).double())


def test_operators_of_different_shapes_are_refused():
    q, k = random(2, 1, 2, 5, 3)
    with pytest.raises(ShapeError, match=r"\(1, 2, 5, 5\) and \(1, 1, 5, 5\)"):
        attention_cosine(AttentionOperator(q, k), AttentionOperator(q[:, :1], k[:, :1]))


@pytest.mark.parametrize("bias", [False, True])
def test_a_nan_is_not_hidden(bias):
    q, k = random(2, 2, 3, 6, 4)
    q[1, 2, 3, 0] = math.nan
    A = AttentionOperator(q, k, mask=torch.zeros(1, 1, 6, 6).double() if bias else None)
    assert attention_entropy(A).isnan().nonzero().tolist() == [[1, 2]]
    assert attention_cosine(A, A).isnan().nonzero().tolist() == [[1, 2]]
    assert head_cosine(A).isnan().tolist() == [False, True]


# --- precision and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["attention_entropy", "attention_cosine", "head_cosine"])
def test_low_precision_input_costs_only_its_own_rounding(name, dtype):
    metric = {"attention_entropy": attention_entropy, "head_cosine": head_cosine}.get(
        name, lambda A: attention_cosine(A, A.symmetrised())
    )
    q, k = random(2, 2, 2, 48, 8, dtype=dtype)
    value = metric(AttentionOperator(q, k))
    assert value.dtype == torch.float32
    exact = metric(AttentionOperator(q.double(), k.double()))
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(metric(AttentionOperator(q, k)), value)


def test_entropy_of_keys_far_from_the_origin():
    # The same offset in every key adds up to 10⁵ to the logits of a row and nothing to its entropy.
    q, k = random(2, 1, 2, 30, 8, dtype=torch.float32)
    far = k + 2**16 * torch.ones(8)
    exact = attention_entropy(AttentionOperator(q.double(), far.double()))
    assert exact.min() > 0.1
    torch.testing.assert_close(attention_entropy(AttentionOperator(q, far)).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kernel": "rbf"}, {"kernel": "polynomial"}], ids=str)
def test_gradients_are_right(options):
    q, k, p = (x.requires_grad_() for x in random(3, 1, 2, 5, 3))
    rows = torch.tensor([[True, True, False, True, True]])

    def metrics(q, k, p):
        A, B = AttentionOperator(q, k, **options), AttentionOperator(p, k, **options)
        return attention_entropy(A, rows), attention_cosine(A, B, rows), head_cosine(A, rows)

    assert torch.autograd.gradcheck(metrics, (q, k, p))


# --- the registries --------------------------------------------------------------------------------


def test_the_registries_name_their_functions():
    assert list(TOKEN_METRICS) == [metric.__name__ for metric in TOKEN_METRICS.values()]
    expected = "attention_entropy head_cosine nonlocal_energy log_nonlocal_energy_raw gradient_alignment"
    assert list(ATTENTION_METRICS) == expected.split()


def test_attention_metrics_read_the_right_part_of_a_record():
    w = world("softmax", "keys", 2)
    record = AttentionCall(operator=w.A, v=w.v, values=w.v, output=w.u, branch=w.u)
    expected = {
        "nonlocal_energy": nonlocal_energy(w.A, w.u, w.rows),
        "log_nonlocal_energy_raw": log_nonlocal_energy_raw(w.A, w.u, w.rows),
        "gradient_alignment": gradient_alignment(w.A, w.v, w.rows),
        "attention_entropy": attention_entropy(w.A, w.rows),
        "head_cosine": head_cosine(w.A, w.rows),
    }
    for name, metric in ATTENTION_METRICS.items():
        assert torch.equal(metric(record, w.rows), expected[name])
        assert metric(record, None).shape in {(2,), (2, 4)}


# --- memory ----------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


N = 2048
MEMORY = {
    **{name: lambda record, metric=metric: metric(record, None) for name, metric in ATTENTION_METRICS.items()},
    "attention_cosine": lambda record: attention_cosine(record.A, record.A),
    **{name: lambda record, metric=metric: metric(record.output, None) for name, metric in TOKEN_METRICS.items()},
}


@pytest.mark.parametrize("kernel", ["softmax", "polynomial"])
@pytest.mark.parametrize("name", MEMORY)
def test_nothing_as_large_as_the_attention_matrix_is_made(name, kernel, monkeypatch):
    monkeypatch.setattr(products, "CPU_TILE", N * 128)
    q, k, u = random(3, 1, 2, N, 4, dtype=torch.float32)
    A = AttentionOperator(q, k, kernel=kernel)
    record = AttentionCall(operator=A, v=u, values=u, output=u, branch=u)
    with torch.no_grad(), LargestTensor() as largest:
        MEMORY[name](record)
    assert 0 < largest.elements <= N * 128


def test_the_memory_test_would_notice():
    A = AttentionOperator(*random(2, 1, 2, 64, 4))
    with LargestTensor() as largest:
        A.dense()
    assert largest.elements >= 2 * 64 * 64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", MEMORY)
def test_cuda_agrees_with_float64_on_the_cpu(name):
    q, k, u = random(3, 2, 2, 197, 64, dtype=torch.float32)

    def value(device, dtype):
        moved = [x.to(device, dtype) for x in (q, k, u)]
        A = AttentionOperator(*moved[:2])
        return (
            MEMORY[name](AttentionCall(operator=A, v=moved[2], values=moved[2], output=moved[2], branch=moved[2]))
            .double()
            .cpu()
        )

    torch.testing.assert_close(value("cuda", torch.float32), value("cpu", torch.float64), rtol=1e-4, atol=1e-5)
