"""Every product and its gradients against the matrix written out, and the laws both obey."""

import pytest
import torch
from operator_cases import assert_close, assert_is_matrix, assert_same_gradients, formula, make_case, sweep, with_heads
from torch import Tensor

from acutance.attention import products
from acutance.attention.operator import AttentionOperator


@sweep
@pytest.mark.usefixtures("tiles")
def test_products_are_those_of_the_matrix(case):
    c = make_case(*case)
    A, (weights, sums) = c.operator, c.expected
    assert_is_matrix(A, (weights, sums), c.x, c.y)
    assert_close(A @ c.y, weights @ c.y)  # as many heads as the queries have
    assert_close(torch.cat([tile for _, tile in A.tiles(3)], dim=-2), weights)
    assert A.T.T is A
    assert A.T.shape == (2, 4, 11, 11)
    nothing = sums == -torch.inf
    assert_close(A.dense().sum(-1), (~nothing).double())
    if case[1] == "full":
        assert nothing.sum() == 1
    if case[1] == "causal+keys":
        assert nothing[0, :, 0].all()
    inputs = [q, k, x, y] = [tensor.clone().requires_grad_() for tensor in (c.q, c.k, c.x, c.y)]
    assert_is_matrix(AttentionOperator(q, k, **c.options), formula(q, k, **c.options), x, y, inputs)


@pytest.mark.parametrize("kernel", products.KERNELS)
@pytest.mark.parametrize("channels", [1, 5, 16, 19, 300])
def test_values_may_have_any_width(kernel, channels, monkeypatch):
    if channels == 19:  # in pieces of the largest width
        monkeypatch.setattr(products, "WIDEST", 8)
    A = make_case(kernel, "keys", grouped=True).operator
    x = torch.randn(2, 2, 11, channels).double()
    assert_close(A @ x, A.dense() @ with_heads(x, 4))


@pytest.mark.parametrize("kernel", [kernel for kernel in products.KERNELS if kernel != "symmetric"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (4, 9), (9, 4), (5, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_queries_and_keys_may_differ_in_number(kernel, queries, keys, masked, causal):
    q, k = torch.randn(2, 4, queries, 6).double(), torch.randn(2, 2, keys, 6).double()
    x, y = torch.randn(2, 2, keys, 6).double(), torch.randn(2, 4, queries, 6).double()
    mask = (torch.arange(keys) != 1).expand(2, -1) if masked else None
    options = {"mask": mask, "causal": causal, "kernel": kernel, "scale": 0.9}
    assert_is_matrix(AttentionOperator(q, k, **options), formula(q, k, **options), x, y)


FLOATS = [(2, 4, 11, 11), (11, 11), (2, 1, 1, 11), (4, 1, 1), ()]
BOOLS = [(2, 1, 1, 11), (1, 4, 1, 11), (11, 11), (2, 4, 11, 1), (11,), (2, 1, 11, 11)]


@pytest.mark.parametrize(("shape", "biased"), [*((shape, True) for shape in FLOATS), *((s, False) for s in BOOLS)])
@pytest.mark.parametrize("kernel", products.KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_and_biases_broadcast(shape, biased, kernel, causal):
    biased = biased and kernel not in ("linear", "polynomial")  # a bias is for exponential kernels
    c = make_case(kernel, grouped=True)
    mask = torch.randn(shape, dtype=torch.float64) if biased else torch.rand(shape) > 0.3
    if biased and len(shape) == 4 and shape[-2] > 1:
        mask[0, 2, 5] = -torch.inf  # sees nothing
        mask[0, 1, :, 4] = -torch.inf
    A = AttentionOperator(c.q, c.k, mask=mask, causal=causal, kernel=kernel)
    assert_is_matrix(A, formula(c.q, c.k, mask, causal, kernel), c.x, c.y)


@pytest.mark.parametrize("kernel", ["softmax", "rbf"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_a_learnt_bias_receives_its_gradient_also_where_it_closes_a_row(kernel, causal):
    c = make_case(kernel)
    bias = torch.randn(4, 11, 11, dtype=torch.float64)
    bias[:, 4] = bias[:, 5, 2] = -torch.inf
    inputs = [q, k, x, y, bias] = [tensor.clone().requires_grad_() for tensor in (c.q, c.k, c.x, c.y, bias)]
    expected = formula(q, k, bias, causal, kernel)
    assert (expected[1][..., 4] == -torch.inf).all()
    assert_is_matrix(AttentionOperator(q, k, mask=bias, causal=causal, kernel=kernel), expected, x, y, inputs)


@pytest.mark.parametrize("kernel", products.KERNELS)
@pytest.mark.parametrize("masking", ["none", "keys", "causal+keys"])
@pytest.mark.parametrize("size", [-1e3, 1e3, 3e4])
def test_extreme_inputs_give_numbers(kernel, masking, size):
    # Products of queries and keys of some 1e4 and more in float32; a negative size mirrors the queries.
    c = make_case(kernel, masking, dtype=torch.float32)
    q, k = (c.q * size).requires_grad_(), c.k.clone().requires_grad_()
    A = AttentionOperator(q, k, **c.options)
    visible = A.logsumexp() > -torch.inf
    assert_close(A.dense().sum(-1), visible.float(), 1e-5)
    assert_close(A @ torch.ones_like(c.x), visible.float()[..., None].expand(-1, -1, -1, 6), 1e-5)
    for product in (A @ c.x, A.T @ c.y, A.logsumexp()[visible]):
        assert product.isfinite().all()
    (A @ c.x).sum().backward()
    assert k.grad.isfinite().all()


def test_linear_attention_survives_features_that_underflow():
    # φ(q)·φ(k) is about e^-800 here, zero in float64; the rows are still distributions.
    q, k = torch.full((2, 1, 1, 3, 4), -400.0).double()
    k[..., 0, :] += 1
    A = AttentionOperator(q, k, kernel="linear")
    expected = torch.tensor([torch.e, 1.0, 1.0], dtype=torch.float64) / (torch.e + 2)
    assert_close(A.dense(), expected.expand(1, 1, 3, 3))
    assert_close(A @ torch.eye(3, dtype=torch.float64).expand(1, 1, 3, 3), expected.expand(1, 1, 3, 3))
    assert_close(A.logsumexp(), torch.full((1, 1, 3), -800 + torch.log(torch.tensor(4 * (torch.e + 2))).item()), 1e-6)


def test_a_polynomial_of_zero_has_no_nan():
    # 1 + s q·k is exactly zero for the first pair, and for every pair of the second query.
    q = torch.tensor([[1.0, 0.0], [1.0, 2.0]]).double().view(1, 1, 2, 2).requires_grad_()
    k = torch.tensor([[-1.0, 0.0], [3.0, -2.0]]).double().view(1, 1, 2, 2).requires_grad_()
    weights = AttentionOperator(q, k, kernel="polynomial", scale=1.0).dense()
    assert_close(weights, torch.tensor([[0.0, 1.0], [0.5, 0.5]]).double().view(1, 1, 2, 2))
    for gradient in torch.autograd.grad((weights * torch.tensor([1.0, 2.0])).sum(), [q, k]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kernel", products.KERNELS)
@pytest.mark.usefixtures("tiles")
def test_dropout_drops_weights_and_scales_the_others_backwards_too(kernel):
    c = make_case(kernel, "causal+keys", grouped=True)
    A, identity = c.operator, torch.eye(11, dtype=torch.float64).expand(2, 4, -1, -1)
    weights, x = A.dense(), c.values.requires_grad_()
    torch.manual_seed(0)
    dropped = A.apply(identity, dropout=0.25)
    kept = dropped != 0
    assert_close(dropped, weights / 0.75 * kept)
    assert 0.15 < (~kept[weights > 0]).double().mean() < 0.35
    torch.manual_seed(0)
    assert_same_gradients(A.apply(x, dropout=0.25), dropped @ x, [x])


def test_symmetrised_replaces_queries_by_keys():
    c = make_case("softmax", "keys", grouped=True)
    S = c.operator.symmetrised()
    assert S.kernel == "symmetric"
    assert_close(S.dense(), formula(c.q, c.k, c.mask, kernel="symmetric")[0])
    assert_close(S @ c.x, S.dense() @ c.values)  # values may still come with the heads of the keys
    R = AttentionOperator(c.q, c.k, kernel="rbf", causal=True).symmetrised()
    assert (R.kernel, R.causal) == ("rbf", True)
    assert_close(R.dense(), formula(with_heads(c.k, 4), c.k, None, True, "rbf")[0])


@pytest.mark.parametrize(
    ("kernel", "masking", "product"),
    [
        ("polynomial", "none", lambda A, x: A @ x),
        ("linear", "causal", lambda A, x: A @ x),
        ("softmax", "causal+keys", lambda A, x: A @ x),
        ("softmax", "none", lambda A, x: A.T @ x),
        ("softmax", "none", lambda A, _: A.logsumexp()),
    ],
)
def test_no_tile_is_kept_for_the_backward_pass(kernel, masking, product):
    c = make_case(kernel, masking, tokens=1200, dtype=torch.float32)
    q, saved = c.q.clone().requires_grad_(), {}

    def remember(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        A = AttentionOperator(q, c.k.clone().requires_grad_(), **c.options)
        out = product(A, c.y)
    assert sum(saved.values()) < 1200 * 1200
    out.sum().backward()
    assert q.grad.isfinite().all()
