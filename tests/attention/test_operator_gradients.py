"""Gradients of the products against those of the formula written out."""

import pytest
import torch
from operator_cases import KERNELS, MASKINGS, Case, assert_close, make_case, sweep
from torch import Tensor

from acutance.attention.operator import AttentionOperator


def formula(c: Case, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log row sums in plain autograd, with masks as factors: no log, no softmax, no tile."""
    k = c.with_heads(k)
    scale = q.size(-1) ** -0.5
    if c.kernel == "symmetric":
        q = k
    if c.kernel in ("softmax", "symmetric"):
        values = (scale * q @ k.mT).exp()
    elif c.kernel == "rbf":
        values = (-scale * (q[:, :, :, None] - k[:, :, None]).square().sum(-1) / 2).exp()
    elif c.kernel == "linear":
        values = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    else:
        values = (1 + scale * q @ k.mT) ** 2
    if c.mask is not None:
        values = values * (c.mask if c.mask.ndim == 4 else c.mask[:, None, None, :])
    if c.causal:
        values = values.tril()
    sums = values.sum(-1)
    # A row of zeros stays one, and takes no part in the sum of the logs.
    return values / sums.masked_fill(sums == 0, 1.0)[..., None], sums[sums > 0].log()


def leaves(c: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, x, y = (tensor.clone().requires_grad_() for tensor in (c.q, c.k, c.x, c.y))
    return q, k, x, y


def assert_same_gradients(mine: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    direction = torch.randn(mine.shape, dtype=mine.dtype, generator=torch.Generator().manual_seed(1))
    assert_close(mine, theirs.detach())
    for own, other in zip(
        torch.autograd.grad(mine, inputs, direction, allow_unused=True, retain_graph=True),
        torch.autograd.grad(theirs, inputs, direction, allow_unused=True, retain_graph=True),
        strict=True,
    ):
        assert (own is None) == (other is None)
        if own is not None:
            assert_close(own, other, 1e-10)


@sweep
@pytest.mark.parametrize("tiles", ["one", "several"])
def test_gradients_are_those_of_the_formula(case, tiles, request):
    if tiles == "several":
        request.getfixturevalue("small_tiles")
    c = make_case(*case)
    q, k, x, y = leaves(c)
    A = AttentionOperator(q, k, **c.options)
    weights, sums = formula(c, q, k)
    assert_same_gradients(A @ x, weights @ c.with_heads(x), [q, k, x])
    assert_same_gradients(A.T @ y, weights.mT @ y, [q, k, y])
    assert_same_gradients(A.logsumexp()[A.logsumexp() > -torch.inf], sums, [q, k])
    assert_same_gradients(A.diagonal(), weights.diagonal(dim1=-2, dim2=-1), [q, k])


@pytest.mark.parametrize("masking", MASKINGS)
def test_the_transpose_is_differentiable_in_one_input_alone(masking):
    for chosen in range(3):
        c = make_case("softmax", masking, grouped=True)
        tensors = [c.q, c.k, c.y]
        tensors[chosen] = leaf = tensors[chosen].clone().requires_grad_()
        q, k, y = tensors
        A = AttentionOperator(q, k, **c.options)
        assert_same_gradients(A.T @ y, formula(c, q, k)[0].mT @ y, [leaf])


@pytest.mark.parametrize("kernel", ["softmax", "rbf"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles", ["one", "several"])
def test_a_learnt_bias_receives_its_gradient(kernel, causal, tiles, request):
    if tiles == "several":
        request.getfixturevalue("small_tiles")
    c = make_case(kernel, "causal" if causal else "none")
    bias = torch.randn(4, 11, 11, dtype=torch.float64, requires_grad=True)
    A = AttentionOperator(c.q, c.k, mask=bias, causal=causal, kernel=kernel)
    weights = formula(c, c.q, c.k)[0] * bias.exp()
    weights = weights / weights.sum(-1, keepdim=True)
    assert_same_gradients(A @ c.x, weights @ c.x, [bias])
    assert_same_gradients(A.T @ c.y, weights.mT @ c.y, [bias])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", ["full", "causal+keys"])
def test_rows_that_see_nothing_have_zero_gradient(kernel, masking):
    c = make_case(kernel, masking)
    q, k, x, y = leaves(c)
    A = AttentionOperator(q, k, **c.options)
    nothing = A.logsumexp().detach() == -torch.inf
    assert nothing.any()
    for product in (A @ x, A.T @ y, A.dense()):
        for gradient in torch.autograd.grad(product.sum(), [q, k, x, y], allow_unused=True, retain_graph=True):
            assert gradient is None or gradient.isfinite().all()
    (gradient,) = torch.autograd.grad((A @ x).square().sum(), q, allow_unused=True)
    if kernel != "symmetric":
        assert (gradient[nothing] == 0).all()
    else:
        assert gradient is None


@pytest.mark.parametrize("tiles", ["one", "several"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_that_closes_a_row_leaves_no_nan(tiles, causal, request):
    if tiles == "several":
        request.getfixturevalue("small_tiles")
    c = make_case("softmax")
    q, k, x, y = leaves(c)
    bias = torch.zeros(11, 11, dtype=torch.float64)
    bias[4] = -torch.inf
    bias[5, 2] = -torch.inf
    A = AttentionOperator(q, k, mask=bias, causal=causal)
    sums = A.logsumexp()
    assert (sums[..., 4] == -torch.inf).all()
    for result in (A @ x, A.T @ y, A.dense(), A.diagonal(), sums[sums > -torch.inf]):
        for gradient in torch.autograd.grad(result.sum(), [q, k, x, y], allow_unused=True, retain_graph=True):
            assert gradient is None or gradient.isfinite().all()


def test_a_polynomial_of_zero_has_no_nan():
    # 1 + s q·k is exactly zero for the first pair, and for every pair of the second query.
    q = torch.tensor([[1.0, 0.0], [1.0, 2.0]]).double().view(1, 1, 2, 2).requires_grad_()
    k = torch.tensor([[-1.0, 0.0], [3.0, -2.0]]).double().view(1, 1, 2, 2).requires_grad_()
    A = AttentionOperator(q, k, kernel="polynomial", scale=1.0)
    weights = A.dense()
    assert_close(weights, torch.tensor([[0.0, 1.0], [0.5, 0.5]]).double().view(1, 1, 2, 2))
    for gradient in torch.autograd.grad((weights * torch.tensor([1.0, 2.0])).sum(), [q, k]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("kernel", "masking", "product"),
    [
        ("polynomial", "none", "apply"),
        ("polynomial", "none", "transpose"),
        ("linear", "causal", "apply"),
        ("softmax", "causal+keys", "apply"),
        ("softmax", "none", "transpose"),
        ("softmax", "none", "logsumexp"),
    ],
)
def test_no_tile_is_kept_for_the_backward_pass(kernel, masking, product):
    c = make_case(kernel, masking, tokens=1200, dtype=torch.float32)
    q, k, x, y = leaves(c)
    saved: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        A = AttentionOperator(q, k, **c.options)
        out = {"apply": lambda: A @ x, "transpose": lambda: A.T @ y, "logsumexp": A.logsumexp}[product]()
    assert sum(saved.values()) < 1200 * 1200
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_gradients_reach_q_through_values_and_operator_alike():
    # u = A(q) x(q): the operator is an ordinary differentiable function of its inputs.
    c = make_case("softmax")
    q = c.q.clone().requires_grad_()
    assert_same_gradients(AttentionOperator(q, c.k) @ (2 * q), formula(c, q, c.k)[0] @ (2 * q), [q])
