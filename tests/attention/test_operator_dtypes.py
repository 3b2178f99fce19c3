"""Half precision, mixed dtypes, autocast and inference mode."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, formula, make_case

from acutance import AttentionOperator

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
@pytest.mark.parametrize("context", [torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_gives_the_same(kernel, context):
    c = make_case(kernel, "causal+keys", grouped=True)
    transposed, product, row_sums = c.operator.T @ c.y, c.operator @ c.x, c.operator.logsumexp()
    with context():
        q, k, y = c.q.clone().requires_grad_(context is torch.enable_grad), c.k.clone(), c.y.clone()
        A = AttentionOperator(q, k, **c.options)
        assert_close(A.T @ y, transposed)
        assert_close(A @ c.x, product)
        assert_close(A.logsumexp(), row_sums)
        assert (A.T @ y).requires_grad == (context is torch.enable_grad and kernel != "symmetric")
        assert not A.eigenvalues(2).requires_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float64).min])
def test_rows_wholly_of_a_low_number_are_one_matrix_in_every_product(low, dtype, causal):
    q, k = torch.randn(2, 2, 2, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    mask[..., 4:], mask[0, :, 0], mask[1, :, 5] = low, low, low
    hidden = torch.zeros_like(mask).masked_fill(mask == low, -torch.inf)
    hidden[0, :, 0], hidden[1, :, 5] = 0, 0  # a constant of a row is none of the softmax's business
    weights, units = formula(q, k, hidden, causal=causal)[0], torch.eye(6, dtype=dtype).expand(2, 2, 6, 6)
    A = AttentionOperator(q, k, mask=mask if low < -1e38 else mask.float(), causal=causal)
    assert_close(A.dense(), weights, 1e-5)
    assert_close(A.diagonal(), weights.diagonal(dim1=-2, dim2=-1), 1e-5)
    assert_close(A.eigenvalues().sum(-1).real, weights.diagonal(dim1=-2, dim2=-1).sum(-1), 1e-5)
    for x in (units, units.double()):
        assert_close(A @ x, weights, TOLERANCE[dtype])
        assert_close((A.T @ x).mT, weights, TOLERANCE[dtype])


def test_written_logits_are_hidden_by_what_libraries_write_and_nan_is_not_hidden():
    for low in (-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf):
        logits = torch.tensor([[0.5, 1.0, low], [low, low, low]])[None, None]
        A = AttentionOperator.from_logits(logits)
        assert_close(A.dense(), logits.softmax(-1).nan_to_num(0), 1e-6)
        assert A.mask[0, 0].tolist() == [[True, True, False], [low > -torch.inf] * 3]
    logits[..., 0, 0] = torch.nan
    assert AttentionOperator.from_logits(logits).dense()[..., 0, :].isnan().any()
