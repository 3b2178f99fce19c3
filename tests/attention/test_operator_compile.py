"""Products trace into one graph, and the graph gives the same values and gradients."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, make_case

from acutance.attention.operator import AttentionOperator


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_traces(case, tolerance: float) -> None:
    def attend(q, k, v):
        return AttentionOperator(q, k, **case.options).apply(v)

    inputs = [tensor.requires_grad_() for tensor in (case.q, case.k, case.x)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*inputs), attend(*inputs)
    assert_close(out, expected, tolerance)
    weights = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(out, inputs, weights, allow_unused=True),
        torch.autograd.grad(expected, inputs, weights, allow_unused=True),
        strict=True,
    ):
        if other is not None:
            assert_close(own, other, tolerance)


# Every kernel and every masking, and where they meet: keys and rows that see nothing, with a softmax and without.
TRACED = [
    ("softmax", "none"),
    ("softmax", "causal+keys"),
    ("symmetric", "causal"),
    ("rbf", "full"),
    ("linear", "keys"),
    ("linear", "causal+keys"),
    ("polynomial", "causal+keys"),
]


def test_every_kernel_and_every_masking_is_traced():
    assert {kernel for kernel, _ in TRACED} == {*KERNELS}
    assert {masking for _, masking in TRACED} == {*MASKINGS}


@pytest.mark.parametrize(("kernel", "masking"), TRACED)
def test_products_trace_without_a_break(kernel, masking):
    assert_traces(make_case(kernel, masking, grouped=True), 1e-11)


def test_symbolic_shapes_trace():
    def attend(q, k, v):
        return AttentionOperator(q, k, causal=True).apply(v)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 12):
        c = make_case("softmax", "causal", tokens=tokens)
        assert_close(compiled(c.q, c.k, c.x), c.operator @ c.x)
