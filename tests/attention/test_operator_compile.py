"""Products trace into one graph, and the graph gives the same values and gradients."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, assert_same, make_case

from acutance.attention.operator import AttentionOperator

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
assert tuple({*names} for names in zip(*TRACED, strict=True)) == ({*KERNELS}, {*MASKINGS})


@pytest.mark.parametrize(("kernel", "masking"), TRACED)
def test_products_trace_without_a_break(kernel, masking):
    case = make_case(kernel, masking, grouped=True)

    def attend(q, k, v):
        return AttentionOperator(q, k, **case.options).apply(v)

    inputs = [tensor.requires_grad_() for tensor in (case.q, case.k, case.x)]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    used = inputs[1:] if kernel == "symmetric" else inputs
    assert_same(compiled(*inputs), attend(*inputs), used, 1e-11)


def test_symbolic_shapes_trace():
    def attend(q, k, v):
        return AttentionOperator(q, k, causal=True).apply(v)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 12):
        c = make_case("softmax", "causal", tokens=tokens)
        assert_close(compiled(c.q, c.k, c.x), c.operator @ c.x)
