"""Floors count what there is: compared with PyTorch's own counter and with sums by hand."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from acutance.lab.bench import floor
from acutance.lab.bench.floor import Ceilings, Problem, linear, of_vit, with_floor
from acutance.lab.bench.language import Size
from acutance.lab.bench.steps import TOY
from acutance.lab.bench.timing import Settings
from acutance.models import LanguageModel, ViT


def flops(kernels):
    return sum(count for _, count in kernels)


@pytest.mark.parametrize("training", [False, True])
def test_flops_of_a_vit_are_those_pytorch_counts(training):
    model, images = ViT(**TOY), torch.randn(3, 3, 8, 8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(model(images), torch.zeros(3, dtype=torch.long))
        if training:
            loss.backward()
    # What keeps the matrix need not make it again in its backward pass, as a kernel does that never writes it.
    again = TOY["depth"] * 2 * 3 * TOY["dim"] * 5**2 if training else 0
    assert flops(of_vit(model, 3, 2, training=training)) == counter.get_total_flops() + again
    products, pointwise = floor.count_flops(model, images[:1])
    assert products == flops(of_vit(model, 1, 2, training=False))
    with_term = floor.count_flops(ViT(**TOY, mitigation="neutreno:0.6"), images[:1])  # but for the first layer
    assert with_term == (products, pointwise + 3 * 5 * TOY["dim"] * (TOY["depth"] - 1))


def test_flops_and_parameters_of_a_language_model_are_those_of_the_model():
    size = Size(tokens=6, batch=2, heads=1, depth=2, vocabulary=50)
    model = LanguageModel(vocabulary=50, dim=size.dim, depth=2, heads=1, hidden=4 * size.dim, cutoffs=(), dropout=0.0)
    words = torch.randint(50, (2, 7))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(words[:, :-1], words[:, 1:])
    unseen = 2 * 2 * 2 * 2 * size.dim * (6 * 5 // 2)  # both products of both layers and texts: pairs above the diagonal
    assert flops(size.kernels(2, training=False)) == counter.get_total_flops() - unseen
    assert size.parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)


def test_bytes_and_flops_counted_by_hand():
    problem = Problem(batch=2, tokens=3, heads=5, width=7)
    values, sums = 2 * 3 * 5 * 7 * 2, 2 * 3 * 5 * 4  # bytes of one activation in bfloat16, and of the log-sums
    product = 2 * 2 * 5 * 3 * 3 * 7  # a multiplication and an addition
    forward, backward = problem.kernels(2, training=True)
    assert problem.kernels(2, training=False) == [forward] == [(4 * values + sums, 2 * product)]  # q, k, v, u
    assert backward == (8 * values + sums, 5 * product)  # q, k, v, u and its gradient to three gradients
    with_term = problem.kernels(2, training=True, term=True)  # v⁰ is read, and has a gradient
    assert [moved for moved, _ in with_term] == [forward[0] + values, backward[0] + values]
    assert linear(6, 8, 4, itemsize=2, passes=2) == [(2 * (6 * 8 + 8 * 4 + 6 * 4), 2 * 6 * 8 * 4)] * 2


def test_the_floor_is_the_sum_of_what_each_kernel_takes_at_least(monkeypatch):
    monkeypatch.setattr(floor, "measured_ceilings", lambda _settings: Ceilings(1e3, 1e6))
    kernels = [*linear(10, 10, 10, itemsize=4), *linear(1, 1000, 1, itemsize=4)]
    ms = 1e3 * (max(4 * 300 / 1e3, 2000 / 1e6) + max(4 * 2001 / 1e3, 2000 / 1e6))
    failed = {"variant": "left out", "note": "left out: out of memory"}
    rows = [{"variant": "plain", "ms": f"{2 * ms}", "note": "the baseline"}, failed]
    ((plain, kept, last),) = with_floor(kernels, iter([rows]), Settings("cpu"))
    assert (plain["times_floor"], kept) == ("2.00", failed)
    assert (last["ms"], last["ratio"], last["gflop"]) == (f"{ms:.4f}", "0.5000", "0.00")
    assert (last["copy_tb_per_s"], last["mbytes"]) == ("0.000", "0.0")


def test_attention_in_plain_pytorch_is_the_formula():
    qkv, first = torch.randn(2, 5, 3 * 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    found = floor.sdpa(qkv, 2, 0.3, first, 0.6)
    for columns in (slice(0, 4), slice(4, 8)):
        q, k, v = (part[..., columns] for part in qkv.split(8, dim=-1))
        u = (q @ k.mT * 0.3).softmax(-1) @ v + 0.6 * (first[..., columns] - v)
        torch.testing.assert_close(found[..., columns], u)
