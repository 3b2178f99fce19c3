"""What does not fit is refused with the shapes in the message."""

import pytest
import torch

from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((2, 5, 8), (2, 4, 5, 8), r"\(batch, heads, tokens, width\); got q \(2, 5, 8\)"),
        ((2, 4, 5, 8), (3, 4, 5, 8), r"batch or width: q \(2, 4, 5, 8\), k \(3, 4, 5, 8\)"),
        ((2, 4, 5, 8), (2, 4, 5, 6), "batch or width"),
        ((2, 4, 5, 8), (2, 3, 5, 8), "no multiple of the heads of k"),
        ((2, 2, 5, 8), (2, 4, 5, 8), "no multiple of the heads of k"),
        ((0, 4, 5, 8), (0, 4, 5, 8), r"at least one of each; got q \(0, 4, 5, 8\), k \(0, 4, 5, 8\)"),
        ((2, 4, 5, 8), (2, 4, 0, 8), "at least one of each"),
    ],
)
def test_queries_and_keys_must_fit(q, k, message):
    with pytest.raises(ShapeError, match=message):
        AttentionOperator(zeros(*q), zeros(*k))


MASK = r"neither a key mask .* \(2, 7\) nor broadcastable to .* \(2, 4, 5, 7\)"
BOOL = {"dtype": torch.bool}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(
            ({"mask": zeros(*shape, **BOOL)}, ShapeError, MASK)
            for shape in [(2, 4, 8, 5), (3, 7), (1, 2, 4, 5, 7), (6,)]
        ),
        ({"mask": zeros(2, 7)}, ShapeError, MASK),  # a float mask of keys needs its axes
        ({"mask": zeros(2, 7, dtype=torch.int64)}, AcutanceError, r"torch.int64; give mask.bool\(\)"),
        ({"mask": zeros(5, 7), "kernel": "linear"}, AcutanceError, "exponential kernel"),
        ({"mask": zeros(5, 7), "kernel": "polynomial"}, AcutanceError, "exponential kernel"),
        ({"kernel": "symmetric"}, ShapeError, "as many queries as keys"),
        ({"kernel": "gauss"}, AcutanceError, r"'gauss'; the known ones are linear, .*softmax, symmetric"),
        ({"kernel": "linear", "softcap": 2.0}, AcutanceError, "linear"),
        ({"softcap": 0.0}, AcutanceError, "positive"),
        ({"sink": zeros(3)}, ShapeError, "per head"),
    ],
)
def test_options_must_fit(options, error, message):
    with pytest.raises(error, match=message):
        AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 4, 7, 8), **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_queries_and_keys_are_floating_point(dtype):
    good, bad = zeros(1, 1, 3, 2), zeros(1, 1, 3, 2, dtype=dtype)
    for name, inputs in (("q", (bad, good)), ("k", (good, bad))):
        with pytest.raises(AcutanceError, match=rf"{name} is {dtype}; .* give {name}.float\(\)"):
            AttentionOperator(*inputs)


@pytest.mark.parametrize("shape", [(4, 7, 8), (1, 4, 7, 8), (2, 1, 7, 8), (2, 3, 7, 8), (2, 4, 6, 8)])
def test_operands_must_fit(shape):
    A = AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8))
    with pytest.raises(ShapeError, match=r"does not fit A \(2, 4, 5, 7\): expected .* \(2, 2 or 4, 7, any\)"):
        A @ zeros(*shape)
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
    with pytest.raises(AcutanceError, match="mask is on meta, the queries on cpu; move one of them"):
        AttentionOperator(A.q, A.k, mask=torch.ones(1, 5, dtype=torch.bool, device="meta"))
