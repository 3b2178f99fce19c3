"""The floor of a step counts what there is: compared with PyTorch's own counter and with sums by hand."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from acutance.lab.bench import step_floor
from acutance.lab.bench.floor import Ceilings, Problem
from acutance.lab.bench.language import Size
from acutance.lab.bench.settings import Settings
from acutance.lab.bench.step_floor import Product, StepFloor, Work, of_vit
from acutance.lab.bench.steps import TOY
from acutance.models import LanguageModel, ViT


def flops(work: Work, *, training: bool) -> float:
    return sum(count for _, count in work.kernels(2, training=training))


@pytest.mark.parametrize("training", [False, True])
def test_flops_of_a_vit_are_those_pytorch_counts(training: bool) -> None:
    model, images = ViT(**TOY), torch.randn(3, 3, 8, 8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(model(images), torch.zeros(3, dtype=torch.long))
        if training:
            loss.backward()
    # What keeps the matrix need not make it again in its backward pass, as a kernel does that never writes it.
    again = TOY["depth"] * 2 * 3 * TOY["dim"] * 5**2 if training else 0
    assert flops(of_vit(model, 3), training=training) == counter.get_total_flops() + again


def test_flops_and_parameters_of_a_language_model_are_those_of_the_model() -> None:
    size = Size(tokens=6, batch=2, heads=1, depth=2, vocabulary=50)
    model = LanguageModel(vocabulary=50, dim=size.dim, depth=2, heads=1, hidden=size.hidden, cutoffs=(), dropout=0.0)
    words = torch.randint(50, (2, 7))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(words[:, :-1], words[:, 1:])
    unseen = 2 * 2 * 2 * 2 * size.dim * (6 * 5 // 2)  # both products of both layers and texts: pairs above the diagonal
    assert flops(size.work(), training=False) == counter.get_total_flops() - unseen
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert size.work().parameters == matrices


def test_bytes_counted_by_hand() -> None:
    attention = Problem(batch=2, tokens=3, heads=1, width=8)
    work = Work([Product(rows=6, inputs=8, outputs=4, passes=2)], [attention], parameters=10)
    product = 6 * 8 + 8 * 4 + 6 * 4
    values, sums = 2 * 3 * 8, 2 * 3
    assert [moved for moved, _ in work.kernels(2, training=False)] == [2 * product, 2 * 4 * values + 4 * sums]
    assert [moved for moved, _ in work.kernels(2, training=True)] == [
        2 * product,
        2 * product,
        2 * 4 * values + 4 * sums,
        2 * 8 * values + 4 * sums,  # q, k, v, u and its gradient to three gradients
        280,
    ]


def test_the_floor_is_the_sum_of_what_each_kernel_takes_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_floor, "measured_ceilings", lambda _settings: Ceilings(1e3, 1e6))
    work = Work([Product(10, 10, 10), Product(1, 1000, 1)], [], parameters=0)
    floor = StepFloor(work, Settings("cpu"), training=False)
    slowest = max(4 * 300 / 1e3, 2000 / 1e6) + max(4 * 2001 / 1e3, 2000 / 1e6)
    assert floor.ms == pytest.approx(1e3 * slowest)
    rows = [
        {"variant": "plain", "ms": f"{2 * floor.ms}", "note": "the baseline"},
        {"variant": "left out", "note": "left out: out of memory"},
    ]
    plain, failed, last = floor.beside(rows)
    assert plain["times_floor"] == "2.00"
    assert failed == rows[1]
    assert (last["ms"], last["ratio"], last["gflop"]) == (f"{floor.ms:.4f}", "0.5000", "0.00")
    assert (last["copy_tb_per_s"], last["mbytes"]) == ("0.000", "0.0")
