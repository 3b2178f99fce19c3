"""What is timed does what it says: training learns, the kernel can be switched off, and formulas give their figures."""

import pytest
import torch
from torch.nn import functional as F

import acutance as ac
from acutance.attention.kernels import packed
from acutance.lab.bench import efficiency, floor, measuring
from acutance.lab.bench.settings import Settings, inference_step, training_step, unfused, without_fused_kernel
from acutance.lab.bench.steps import TOY
from acutance.models import ViT

CPU = Settings("cpu")


def test_a_training_step_is_that_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    model, twin = ViT(**TOY), ViT(**TOY)
    twin.load_state_dict(model.state_dict())
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    step = training_step(model, [images], lambda scores: F.cross_entropy(scores, labels))
    optimiser = torch.optim.AdamW(twin.parameters(), lr=1e-4)
    for _ in range(2):
        step()
        F.cross_entropy(twin(images), labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    for (name, trained), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(trained, expected), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inference_leaves_no_graph_and_evaluates() -> None:
    seen: list[tuple[bool, bool]] = []
    model = ViT(**TOY)
    model.register_forward_hook(lambda module, _inputs, out: seen.append((module.training, out.requires_grad)))
    inference_step(model, [torch.randn(1, 3, 8, 8)])()
    assert seen == [(False, False)]


def test_the_kernel_is_off_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "is_available", lambda _qkv, _heads: True)
    seen: list[bool] = []

    def step() -> None:
        seen.append(packed.is_available(torch.empty(0), 1))

    step()
    unfused(step)()
    step()
    assert seen == [True, False, True]


def test_the_model_asks_whether_the_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else switching it off would time the kernel against itself."""
    asked: list[int] = []
    monkeypatch.setattr(packed, "is_available", lambda _qkv, heads: bool(asked.append(heads)))
    model, images = ViT(**TOY, mitigation="neutreno:0.6"), torch.randn(1, 3, 8, 8)
    model(images)
    assert asked == [3, 3]
    with without_fused_kernel():
        model(images)
    assert asked == [3, 3]


def test_the_term_costs_three_operations_a_value_in_every_layer_but_the_first() -> None:
    images = torch.randn(1, 3, 8, 8)
    products, pointwise = efficiency.count_flops(ViT(**TOY), images)
    with_term = efficiency.count_flops(ViT(**TOY, mitigation="neutreno:0.6"), images)
    tokens, dim, layers, classes, patch = 5, TOY["dim"], TOY["depth"], TOY["num_classes"], 3 * TOY["patch_size"] ** 2
    assert with_term == (products, pointwise + 3 * tokens * dim * (layers - 1))
    in_a_layer = tokens * 12 * dim**2 + 2 * tokens**2 * dim  # multiplications: projections and MLP, q kᵀ and A v
    assert products == 2 * (layers * in_a_layer + (tokens - 1) * patch * dim + dim * classes)


def test_bytes_and_flops_of_attention_counted_by_hand() -> None:
    problem = floor.Problem(batch=2, tokens=3, heads=5, width=7)
    values = 2 * 3 * 5 * 7 * 2  # bytes of one activation in bfloat16
    sums = 2 * 3 * 5 * 4
    assert problem.bytes_moved(2, term=False, backward=False) == 4 * values + sums  # q, k, v, u
    assert problem.bytes_moved(2, term=True, backward=False) == 5 * values + sums  # and v⁰
    with_gradients = problem.bytes_moved(2, term=True, backward=True)
    assert with_gradients - problem.bytes_moved(2, term=True, backward=False) == 9 * values + sums
    product = 2 * 2 * 5 * 3 * 3 * 7  # a multiplication and an addition
    assert problem.flops(backward=False) == 2 * product
    assert problem.flops(backward=True) == 7 * product


def test_the_floor_is_the_slower_of_the_two() -> None:
    ceilings = floor.Ceilings(bytes_per_second=10, flops_per_second=100)
    assert ceilings.floor(30, 100) == 3
    assert ceilings.floor(30, 500) == 5


def test_attention_in_plain_pytorch_is_the_formula() -> None:
    heads, scale = 2, 0.3
    qkv, first = torch.randn(2, 5, 3 * 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    found = floor.sdpa(qkv, heads, scale, first, 0.6)
    for head in range(heads):
        columns = slice(4 * head, 4 * head + 4)
        q, k, v = (part[..., columns] for part in qkv.split(8, dim=-1))
        u = (q @ k.mT * scale).softmax(-1) @ v + 0.6 * (first[..., columns] - v)
        torch.testing.assert_close(found[..., columns], u)


def test_the_obvious_way_reads_the_same_figures() -> None:
    """Or else its cost would not be that of the same thing."""
    torch.manual_seed(0)
    subject = measuring._vit(4, CPU)
    found = subject.obvious()
    profile = ac.measure(subject.model, [subject.batch], metrics=measuring.WITH_ATTENTION, progress=False)
    means = {(reading.layer, reading.metric): reading.mean for reading in profile.readings}
    assert len(found) == TOY["depth"]
    for layer, figures in enumerate(found, 1):
        expected = [means[layer, name] for name in measuring.WITH_ATTENTION]
        assert figures == pytest.approx(expected, rel=1e-4)
    assert not any(block._forward_hooks for block in subject.model.blocks)
