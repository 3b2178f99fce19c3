"""Every product against the matrix, the matrix against the formula, and the laws both obey."""

import pytest
import torch
from operator_cases import KERNELS, LargestTensor, assert_close, make_case, oracle, sweep

from acutance.attention import AttentionCall, products
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import KERNELS as REGISTRY
from acutance.attention.products import Kernel


@sweep
def test_the_matrix_and_its_row_sums_follow_the_formula(case):
    c = make_case(*case)
    weights, sums = oracle(c.q, c.k, c.mask, c.causal, 6**-0.5, c.kernel)
    assert_close(c.operator.dense(), weights)
    assert_close(c.operator.logsumexp(), sums)


@sweep
def test_rows_sum_to_one_or_see_nothing(case):
    A = make_case(*case).operator
    weights = A.dense()
    nothing = A.logsumexp() == -torch.inf
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), (~nothing).double())
    if case[1] == "full":
        assert nothing.sum() == 1
    if case[1] == "causal+keys":
        assert nothing[0, :, 0].all()


@sweep
@pytest.mark.parametrize("tiles", ["one", "several"])
def test_products_are_those_of_the_matrix(case, tiles, request):
    if tiles == "several":
        request.getfixturevalue("small_tiles")
    c = make_case(*case)
    A, weights = c.operator, torch.from_numpy(oracle(c.q, c.k, c.mask, c.causal, 6**-0.5, c.kernel)[0])
    assert_close(A @ c.x, weights @ c.with_heads(c.x))
    assert_close(A @ c.y, weights @ c.y)  # as many heads as the queries have
    assert_close(A.T @ c.y, weights.mT @ c.y)
    assert_close(A.diagonal(), weights.diagonal(dim1=-2, dim2=-1))
    assert_close(A.dense(), weights)


@sweep
def test_the_transpose_is_the_adjoint(case):
    c = make_case(*case)
    A = c.operator
    assert_close((c.y * (A @ c.x)).sum(), ((A.T @ c.y) * c.with_heads(c.x)).sum())
    assert A.T.T is A
    assert A.T.shape == (2, 4, 11, 11)


@sweep
@pytest.mark.parametrize("rows", [None, 1, 4, 11, 50])
def test_tiles_make_up_the_matrix(case, rows):
    A = make_case(*case).operator
    weights = A.dense()
    covered = 0
    for block, tile in A.tiles(rows):
        assert block.start == covered
        assert_close(tile, weights[..., block, :], 1e-15)
        covered = block.stop
    assert covered == 11


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("channels", [1, 5, 6, 7, 16, 19, 300])
def test_values_may_have_any_width(kernel, channels, monkeypatch):
    if channels == 19:  # in pieces of the largest width
        monkeypatch.setattr(products, "WIDEST", 8)
    c = make_case(kernel, "keys", grouped=True)
    A, weights = c.operator, c.operator.dense()
    x = torch.randn(2, 2, 11, channels, dtype=torch.float64)
    y = torch.randn(2, 4, 11, channels, dtype=torch.float64)
    assert_close(A @ x, weights @ c.with_heads(x))
    assert_close(A.T @ y, weights.mT @ y)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "symmetric"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (4, 9), (9, 4), (5, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_queries_and_keys_may_differ_in_number(kernel, queries, keys, masked, causal):
    q, k = torch.randn(2, 4, queries, 6).double(), torch.randn(2, 2, keys, 6).double()
    x, y = torch.randn(2, 2, keys, 6).double(), torch.randn(2, 4, queries, 6).double()
    mask = (torch.arange(keys) != 1).expand(2, -1) if masked else None
    A = AttentionOperator(q, k, mask=mask, causal=causal, kernel=kernel)
    weights = torch.from_numpy(oracle(q, k, mask, causal, 6**-0.5, kernel)[0])
    assert_close(A.dense(), weights)
    assert_close(A @ x, weights @ x.repeat_interleave(2, dim=1))
    assert_close(A.T @ y, weights.mT @ y)


def test_generation_with_a_cache_equals_the_last_rows():
    c = make_case("softmax", "causal")
    assert_close(AttentionOperator(c.q[:, :, -3:], c.k, causal=True) @ c.x, (c.operator @ c.x)[:, :, -3:])


@pytest.mark.parametrize("shape", [(2, 4, 11, 11), (1, 4, 11, 11), (11, 11), (2, 1, 1, 11), (4, 1, 1), ()])
@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "rbf"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_float_mask_is_added_to_the_logits(shape, kernel, causal):
    c = make_case(kernel, grouped=True)
    bias = torch.randn(shape, dtype=torch.float64)
    if len(shape) == 4 and shape[-2] > 1:
        bias[0, 2, 5] = -torch.inf  # sees nothing
        bias[0, 1, :, 4] = -torch.inf
    A = AttentionOperator(c.q, c.k, mask=bias, causal=causal, kernel=kernel)
    weights, sums = oracle(c.q, c.k, bias, causal, 6**-0.5, kernel)
    assert_close(A.dense(), weights)
    assert_close(A.logsumexp(), sums)
    assert_close(A @ c.x, torch.from_numpy(weights) @ c.with_heads(c.x))
    assert_close(A.T @ c.y, torch.from_numpy(weights).mT @ c.y)
    assert_close(A.diagonal(), A.dense().diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("shape", [(2, 1, 1, 11), (1, 4, 1, 11), (11, 11), (2, 4, 11, 1), (11,), (2, 1, 11, 11)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bool_masks_broadcast(shape, kernel):
    c = make_case(kernel)
    mask = torch.rand(shape) > 0.3
    A = AttentionOperator(c.q, c.k, mask=mask, kernel=kernel)
    weights = oracle(c.q, c.k, mask, False, 6**-0.5, kernel)[0]
    assert_close(A.dense(), weights)
    assert_close(A @ c.x, torch.from_numpy(weights) @ c.x)
    assert_close(A.T @ c.y, torch.from_numpy(weights).mT @ c.y)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", ["keys", "causal+keys"])
@pytest.mark.parametrize("grouped", [False, True])
def test_masked_keys_do_not_matter(kernel, masking, grouped):
    c = make_case(kernel, masking, grouped)
    k, x = c.k.clone(), c.x.clone()
    k.mT[(~c.mask)[:, None, None, :].expand_as(k.mT)] = 3.0
    x.mT[(~c.mask)[:, None, None, :].expand_as(x.mT)] = -50.0
    other = AttentionOperator(c.q, k, **c.options)
    if c.kernel == "symmetric":  # there they are queries too, and those rows do change
        kept = c.mask[:, None, :, None]
        assert_close((other @ x) * kept, (c.operator @ c.x) * kept)
    else:
        assert_close(other @ x, c.operator @ c.x)


@pytest.mark.parametrize("kernel", ["softmax", "rbf", "polynomial"])
def test_the_scale_is_honoured(kernel):
    c = make_case(kernel)
    assert_close(
        AttentionOperator(c.q, c.k, scale=0.9, kernel=kernel).dense(),
        oracle(c.q, c.k, None, False, 0.9, kernel)[0],
    )


@pytest.mark.parametrize("kernel", KERNELS)
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
    q, k = torch.full((1, 1, 3, 4), -400.0).double(), torch.full((1, 1, 3, 4), -400.0).double()
    k[..., 0, :] += 1
    A = AttentionOperator(q, k, kernel="linear")
    expected = torch.tensor([torch.e, 1.0, 1.0], dtype=torch.float64) / (torch.e + 2)
    assert_close(A.dense(), expected.expand(1, 1, 3, 3))
    assert_close(A @ torch.eye(3, dtype=torch.float64).expand(1, 1, 3, 3), expected.expand(1, 1, 3, 3))
    assert_close(A.logsumexp(), torch.full((1, 1, 3), -800 + torch.log(torch.tensor(4 * (torch.e + 2))).item()), 1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tiles", ["one", "several"])
def test_dropout_drops_weights_and_scales_the_others(kernel, tiles, request):
    if tiles == "several":
        request.getfixturevalue("small_tiles")
    c = make_case(kernel, "causal+keys", grouped=True)
    weights = c.operator.dense()
    torch.manual_seed(0)
    identity = torch.eye(11, dtype=torch.float64).expand(2, 4, -1, -1)
    dropped = c.operator.apply(identity, dropout=0.25)
    kept = dropped != 0
    assert_close(dropped, weights / 0.75 * kept)
    assert 0.15 < (~kept[weights > 0]).double().mean() < 0.35


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("small_tiles")
def test_the_backward_pass_drops_the_same_weights(kernel):
    c = make_case(kernel)
    q, x = c.q.clone().requires_grad_(), c.x.clone().requires_grad_()
    A = AttentionOperator(q, c.k, kernel=kernel)
    torch.manual_seed(0)
    dropped = A.apply(torch.eye(11, dtype=torch.float64).expand(2, 4, -1, -1), dropout=0.25).detach()
    torch.manual_seed(0)
    out = A.apply(x, dropout=0.25)
    assert_close(out, (dropped @ x).detach())
    assert_close(torch.autograd.grad(out, x, c.y)[0], dropped.mT @ c.y)


def test_symmetrised_replaces_queries_by_keys():
    c = make_case("softmax", "keys", grouped=True)
    S = c.operator.symmetrised()
    assert S.kernel == "symmetric"
    assert_close(S.dense(), oracle(c.q, c.k, c.mask, False, 6**-0.5, "symmetric")[0])
    assert_close(S @ c.x, S.dense() @ c.with_heads(c.x))  # values may still come with the heads of the keys
    R = AttentionOperator(c.q, c.k, kernel="rbf", causal=True).symmetrised()
    assert (R.kernel, R.causal) == ("rbf", True)
    assert_close(R.dense(), oracle(c.with_heads(c.k), c.k, None, True, 6**-0.5, "rbf")[0])


def test_a_new_kernel_is_its_logarithm(monkeypatch):
    def log_cauchy(q, k, scale):
        return -torch.log1p(scale * torch.cdist(q, k).square())

    monkeypatch.setitem(REGISTRY, "cauchy", Kernel(log_cauchy))
    c = make_case("softmax", "causal")
    A = AttentionOperator(c.q, c.k, causal=True, kernel="cauchy")
    distance = (c.q[:, :, :, None] - c.k[:, :, None]).square().sum(-1)
    values = (1 / (1 + distance / 6**0.5)).tril()
    assert_close(A @ c.x, values / values.sum(-1, keepdim=True) @ c.x)
    assert_close(A.diagonal(), (values / values.sum(-1, keepdim=True)).diagonal(dim1=-2, dim2=-1))


def test_construction_computes_nothing():
    for kernel in KERNELS:
        c = make_case(kernel)
        with LargestTensor() as record:
            A = c.operator
        assert record.elements == 0
        assert A.k is c.k
        assert A.q is (c.k if kernel == "symmetric" else c.q)
    assert "kernel='polynomial'" in repr(A)
    assert (A.heads, A.shape, A.dtype, A.device.type) == (4, (2, 4, 11, 11), torch.float64, "cpu")


def test_a_record_holds_what_it_was_given():
    c = make_case("softmax")
    A = c.operator
    record = AttentionCall(operator=A, v=c.x, values=c.x, output=c.y, branch=c.y[:, 0])
    assert record.v0 is None
    assert record.A is A
    with pytest.raises(AttributeError):
        record.unknown = A  # nothing but what its docstring names
