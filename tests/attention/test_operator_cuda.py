"""On CUDA: the same products, and memory that grows with the tokens on every back-end."""

from collections.abc import Callable

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, make_case
from torch import Tensor

from acutance.attention.operator import AttentionOperator

pytestmark = pytest.mark.cuda

TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-3, torch.bfloat16: 3e-2}  # float32 may multiply in TF32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("width", [6, 16])
def test_products_are_those_of_the_matrix(dtype, kernel, masking, grouped, width):
    c = make_case(kernel, masking, grouped, dtype=dtype, width=width, device="cuda")
    A, weights, x, y = c.operator, c.expected[0], c.values, c.y.double()
    assert (A @ c.x).dtype == dtype
    assert_close(A @ c.x, weights @ x, TOLERANCE[dtype])
    assert_close(A.T @ c.y, weights.mT @ y, 2 * TOLERANCE[dtype])
    assert_close(A @ c.x[..., :5], weights @ x[..., :5], TOLERANCE[dtype])
    assert_close(A.diagonal(), weights.diagonal(dim1=-2, dim2=-1), min(TOLERANCE[dtype], 1e-3))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", MASKINGS)
def test_gradients_are_those_on_the_cpu(dtype, kernel, masking):
    here, there = (make_case(kernel, masking, True, dtype=dtype, width=16, device=device) for device in ("cpu", "cuda"))
    gradients = []
    for c, precision in ((here, torch.float64), (there, dtype)):
        leaves = [tensor.to(precision).requires_grad_() for tensor in (c.q, c.k, c.x)]
        A = AttentionOperator(leaves[0], leaves[1], **c.options)
        product = (A @ leaves[2]).double().square().sum() + (A.T @ A.q.detach()).double().square().sum()
        gradients.append(torch.autograd.grad(product, leaves, allow_unused=True))
    for expected, found in zip(*gradients, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            scale = expected.abs().max()
            assert_close(found / scale.cuda(), expected / scale, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "rbf", "linear"])
def test_spectra_are_those_of_the_matrix(kernel):
    c = make_case(kernel, "keys", tokens=600, width=16, dtype=torch.float64, device="cuda")
    A = AttentionOperator(c.q[:1, :2], c.k[:1, :2], mask=c.mask[:1], kernel=kernel)
    matrix = torch.linalg.eigvals(A.dense().cpu())
    assert_close(A.eigenvalues(4).abs(), matrix.abs().sort(dim=-1, descending=True).values[..., :4], 1e-8)
    distribution = A.stationary()
    assert_close((A.T @ distribution[..., None]).squeeze(-1), distribution, 1e-9)
    assert_close(distribution.sum(-1), torch.ones(1, 2).double())


def peak_bytes(function: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", [masking for masking in MASKINGS if masking != "full"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_memory_is_far_below_the_matrix(dtype, kernel, masking, key_heads):
    tokens = 16384
    q, k, v = (torch.randn(1, h, tokens, 64, device="cuda", dtype=dtype) for h in (2, key_heads, key_heads))
    mask = torch.arange(tokens, device="cuda")[None] < tokens - 100 if "keys" in masking else None
    matrix_bytes = 2 * tokens**2 * q.element_size()

    def operator(q: Tensor, k: Tensor) -> AttentionOperator:
        return AttentionOperator(q, k, mask=mask, causal="causal" in masking, kernel=kernel)

    def train() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        (operator(*leaves[:2]) @ leaves[2]).sum().backward()

    A = operator(q, k)
    for function in (lambda: A @ v, lambda: A @ v[..., :3], lambda: A.T @ q, A.logsumexp, train):
        assert peak_bytes(function) < matrix_bytes / 4
    if kernel in ("softmax", "symmetric") and masking == "none" and key_heads == 2:
        for function in (lambda: A.eigenvalues(1), A.stationary):
            assert peak_bytes(function) < 2 * tokens**2
