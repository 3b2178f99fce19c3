import pytest
import torch

from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = zeros(2, 4, 5, 8), zeros(2, 4, 7, 8)
MASK = r"neither a key mask .* \(2, 7\) nor broadcastable to .* \(2, 4, 5, 7\)"
NO_FLOATS = (torch.int64, torch.complex64)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q": zeros(2, 5, 8)}, ShapeError, r"\(batch, heads, tokens, width\).*; got q \(2, 5, 8\)"),
        ({"k": zeros(3, 4, 5, 8)}, ShapeError, r"batch or width.*: q \(2, 4, 5, 8\), k \(3, 4, 5, 8\)"),
        ({"k": zeros(2, 4, 5, 6)}, ShapeError, "batch or width"),
        ({"k": zeros(2, 3, 5, 8)}, ShapeError, "no multiple"),
        ({"k": zeros(2, 4, 0, 8)}, ShapeError, "at least one of each"),
        *(({"q": Q.to(dtype)}, AcutanceError, rf"q is {dtype}; .* give q.float\(\)") for dtype in NO_FLOATS),
        *(({"k": K.to(dtype)}, AcutanceError, rf"k is {dtype}; .* give k.float\(\)") for dtype in NO_FLOATS),
        *(({"mask": zeros(*s, dtype=torch.bool)}, ShapeError, MASK) for s in [(2, 4, 8, 5), (3, 7), (1, 2, 4, 5, 7)]),
        ({"mask": zeros(2, 7)}, ShapeError, MASK),  # a float mask of keys needs its axes
        ({"mask": zeros(2, 7, dtype=torch.int64)}, AcutanceError, r"torch.int64; give mask.bool\(\)"),
        ({"mask": zeros(5, 7), "kernel": "linear"}, AcutanceError, "exponential kernel"),
        ({"mask": zeros(2, 7, dtype=torch.bool, device="meta")}, AcutanceError, "mask is on meta, the queries on cpu"),
        ({"kernel": "symmetric"}, ShapeError, "as many queries as keys"),
        ({"kernel": "gauss"}, AcutanceError, r"'gauss'; the known ones are linear, .*softmax, symmetric"),
        ({"kernel": "linear", "softcap": 2.0}, AcutanceError, "linear"),
        ({"softcap": 0.0}, AcutanceError, "positive"),
        ({"sink": zeros(3)}, ShapeError, "per head"),
    ],
)
def test_queries_keys_and_options_must_fit(options, error, message):
    with pytest.raises(error, match=message):
        AttentionOperator(**{"q": Q, "k": K} | options)


@pytest.mark.parametrize("shape", [(4, 7, 8), (1, 4, 7, 8), (2, 3, 7, 8), (2, 4, 6, 8)])
def test_operands_and_what_needs_a_square_must_fit(shape):
    A = AttentionOperator(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8))
    with pytest.raises(ShapeError, match=r"does not fit A \(2, 4, 5, 7\): expected .* \(2, 2 or 4, 7, any\)"):
        A @ zeros(*shape)
    with pytest.raises(ShapeError, match=r"does not fit A \(2, 4, 5, 7\): expected .* \(2, 4, 5, any\)"):
        A.T @ zeros(*shape)
    with pytest.raises(AcutanceError, match="x is on meta, the queries on cpu"):
        A @ zeros(2, 4, 7, 8, device="meta")
    for refused in (A.eigenvalues, A.extreme_eigenvalues, A.stationary, A.diagonal):
        with pytest.raises(ShapeError, match=r"as many queries as keys; .* \(2, 4, 5, 7\)"):
            refused()
