"""Products trace into one graph, and the graph gives the same values and gradients."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, make_case

from acutance.operator import AttentionOperator


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_traces(case, backend: str, tolerance: float) -> None:
    def attend(q, k, v):
        return AttentionOperator(q, k, **case.options).apply(v)

    inputs = [tensor.requires_grad_() for tensor in (case.q, case.k, case.x)]
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", MASKINGS)
def test_products_trace_without_a_break(kernel, masking):
    assert_traces(make_case(kernel, masking, grouped=True), "aot_eager", 1e-11)


def test_symbolic_shapes_trace():
    def attend(q, k, v):
        return AttentionOperator(q, k, causal=True).apply(v)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 12):
        c = make_case("softmax", "causal", tokens=tokens)
        assert_close(compiled(c.q, c.k, c.x), c.operator @ c.x)


@pytest.mark.slow
def test_inductor_gives_the_same():
    assert_traces(make_case("softmax", "keys", dtype=torch.float32), "inductor", 1e-4)
