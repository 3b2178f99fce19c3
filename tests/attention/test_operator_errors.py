"""What does not fit is refused with the shapes in the message."""

import pytest
import torch

from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((2, 5, 8), (2, 4, 5, 8), r"\(batch, heads, tokens, width\); got q \(2, 5, 8\)"),
        ((2, 4, 5, 8), (3, 4, 5, 8), r"batch or width: q \(2, 4, 5, 8\), k \(3, 4, 5, 8\)"),
        ((2, 4, 5, 8), (2, 4, 5, 6), "batch or width"),
        ((2, 4, 5, 8), (2, 3, 5, 8), "no multiple of the heads of k"),
        ((2, 2, 5, 8), (2, 4, 5, 8), "no multiple of the heads of k"),
        ((0, 4, 5, 8), (0, 4, 5, 8), r"at least one of each; got q \(0, 4, 5, 8\), k \(0, 4, 5, 8\)"),
        ((2, 0, 5, 8), (2, 0, 5, 8), "at least one of each"),
        ((2, 4, 5, 8), (2, 0, 5, 8), "at least one of each"),
        ((2, 4, 0, 8), (2, 4, 5, 8), "at least one of each"),
        ((2, 4, 5, 8), (2, 4, 0, 8), "at least one of each"),
        ((2, 4, 5, 0), (2, 4, 5, 0), "at least one of each"),
    ],
)
def test_queries_and_keys_must_fit(q, k, message):
    with pytest.raises(ShapeError, match=message):
        AttentionOperator(zeros(*q), zeros(*k))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_queries_and_keys_are_floating_point(dtype):
    good, bad = zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2, dtype=dtype)
    with pytest.raises(AcutanceError, match=rf"q is {dtype}; .* give q.float\(\)"):
        AttentionOperator(bad, good)
    with pytest.raises(AcutanceError, match=rf"k is {dtype}; .* give k.float\(\)"):
        AttentionOperator(good, bad)


def test_symmetric_attention_is_square():
    with pytest.raises(ShapeError, match="as many queries as keys"):
        AttentionOperator(zeros(1, 1, 3, 2), zeros(1, 1, 4, 2), kernel="symmetric")


def test_unknown_kernels_are_named():
    with pytest.raises(AcutanceError, match=r"'gauss'; the known ones are linear, polynomial, rbf, softmax, symmetric"):
        AttentionOperator(zeros(1, 1, 3, 2), zeros(1, 1, 3, 2), kernel="gauss")


@pytest.mark.parametrize("shape", [(2, 4, 8, 5), (3, 7), (1, 2, 4, 5, 7), (2, 3, 5, 7), (7, 5), (6,)])
def test_masks_must_broadcast(shape):
    with pytest.raises(ShapeError, match=r"neither a key mask .* \(2, 7\) nor broadcastable to .* \(2, 4, 5, 7\)"):
        AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 4, 7, 8), mask=torch.ones(shape, dtype=torch.bool))


def test_a_float_mask_of_keys_needs_its_axes():
    with pytest.raises(ShapeError, match="nor broadcastable"):
        AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 4, 7, 8), mask=torch.ones(2, 7))


def test_masks_are_bool_or_float():
    with pytest.raises(AcutanceError, match=r"torch.int64; give mask.bool\(\)"):
        AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 4, 7, 8), mask=torch.ones(2, 7).long())


@pytest.mark.parametrize("kernel", ["linear", "polynomial"])
def test_float_masks_need_an_exponential_kernel(kernel):
    with pytest.raises(AcutanceError, match="exponential kernel"):
        AttentionOperator(zeros(1, 1, 5, 8), zeros(1, 1, 5, 8), mask=zeros(5, 5), kernel=kernel)


@pytest.mark.parametrize("shape", [(4, 7, 8), (1, 4, 7, 8), (2, 1, 7, 8), (2, 3, 7, 8), (2, 4, 5, 8)])
def test_values_must_fit(shape):
    A = AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8))
    with pytest.raises(ShapeError, match=r"does not fit A \(2, 4, 5, 7\): expected .* \(2, 2 or 4, 7, any\)"):
        A @ zeros(*shape)


@pytest.mark.parametrize("shape", [(4, 5, 8), (2, 2, 5, 8), (2, 4, 7, 8)])
def test_what_the_transpose_is_applied_to_must_fit(shape):
    A = AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8))
    with pytest.raises(ShapeError, match=r"does not fit A \(2, 4, 5, 7\): expected .* \(2, 4, 5, any\)"):
        A.T @ zeros(*shape)


@pytest.mark.parametrize("method", ["eigenvalues", "extreme_eigenvalues", "stationary", "diagonal"])
def test_spectra_need_a_square(method):
    A = AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8))
    with pytest.raises(ShapeError, match=r"as many queries as keys; .* \(2, 4, 5, 7\)"):
        getattr(A, method)()


def test_devices_must_agree():
    A = AttentionOperator(zeros(1, 1, 5, 8), zeros(1, 1, 5, 8))
    with pytest.raises(AcutanceError, match="x is on meta, the queries on cpu"):
        A @ torch.zeros(1, 1, 5, 8, device="meta")
    with pytest.raises(AcutanceError, match="k is on meta, the queries on cpu; move one of them"):
        AttentionOperator(A.q, A.k.to("meta"))
    with pytest.raises(AcutanceError, match="mask is on meta, the queries on cpu; move one of them"):
        AttentionOperator(A.q, A.k, mask=torch.ones(1, 5, dtype=torch.bool, device="meta"))
