"""Half precision, mixed dtypes, autocast and inference mode; and traced into one graph of the same gradients."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, assert_products, assert_same, formula, make_case

from acutance.attention.operator import AttentionOperator

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", MASKINGS)
def test_products_are_as_good_as_their_dtype(dtype, kernel, masking):
    c = make_case(kernel, masking, grouped=True, dtype=dtype)
    A, (weights, sums) = c.operator, c.expected
    assert (A @ c.x).dtype == (A.T @ c.y).dtype == dtype
    assert_close(A @ c.x, weights @ c.values, TOLERANCE[dtype])
    assert_close(A.T @ c.y, weights.mT @ c.y.double(), 2 * TOLERANCE[dtype])
    # What is read rather than passed on is float32, however coarse the inputs.
    assert A.logsumexp().dtype == A.dense().dtype == A.diagonal().dtype == torch.float32
    assert_close(A.logsumexp(), sums, 1e-5)
    assert_close(A.dense(), weights, 1e-5)
    assert_close(A.diagonal(), weights.diagonal(dim1=-2, dim2=-1), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_distances_keep_their_digits(dtype):
    # Keys far from the origin: ‖k‖²/2 in one bfloat16 channel would be wrong by several units.
    c = make_case("rbf", dtype=dtype, sharpness=1.0)
    k, q = c.k + 8, c.q + 8
    assert_close(AttentionOperator(q, k, kernel="rbf") @ c.x, formula(q, k, kernel="rbf")[0] @ c.values, 0.1)


@pytest.mark.parametrize("kernel", ["softmax", "linear", "polynomial"])
def test_products_take_the_wider_dtype(kernel):
    c = make_case(kernel, dtype=torch.bfloat16)
    weights, x = c.expected[0], torch.randn(2, 4, 11, 6)
    assert (c.operator @ x).dtype == torch.float32
    assert_close(c.operator @ x, weights @ x.double(), 1e-5)
    assert (c.operator.T @ x.double()).dtype == torch.float64
    wide = c.operator.to(torch.float64)
    assert wide.dtype == (wide @ c.x).dtype == torch.float64
    assert_close(wide @ c.x, weights @ c.values)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", ["none", "causal+keys"])
def test_autocast_does_not_coarsen_row_sums(kernel, masking):
    c = make_case(kernel, masking, dtype=torch.float32)
    weights, sums = c.expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, row_sums, diagonal = c.operator @ c.x, c.operator.logsumexp(), c.operator.diagonal()
        mixed = c.operator @ c.x.bfloat16()
    assert_close(row_sums, sums, 1e-5)
    assert_close(diagonal, c.operator.diagonal(), 1e-6)
    for product in (out, mixed):
        assert_close(product, weights @ c.values, 6e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inference_mode_gives_the_same_and_spectra_have_no_gradient(kernel):
    c = make_case(kernel, "causal+keys", grouped=True)
    with torch.inference_mode():
        A = AttentionOperator(c.q.clone(), c.k.clone(), **c.options)
        assert_products(A, c.expected, c.x.clone(), c.y.clone())
    assert not AttentionOperator(c.q.requires_grad_(), c.k, **c.options).eigenvalues(2).requires_grad


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
