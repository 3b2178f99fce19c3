"""The fused GELU against float64: on a GPU, and on the CPU in Triton's interpreter, and the polynomial by itself.

The interpreter needs triton and TRITON_INTERPRET=1: `make test` runs this folder a second time so.
"""

import copy

import pytest
import torch
from graph_recorder import recorder
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from acutance.kernels import gelu, packed
from acutance.models import ViT
from acutance.models.layers import Mlp

CUDA = torch.cuda.is_available() and packed.TRITON and packed._is_known(None)
DEVICE = "cuda" if CUDA else "cpu"
needs_kernels = pytest.mark.skipif(
    not (CUDA or (packed.INTERPRETED and packed.TRITON)), reason="needs a GPU or Triton's interpreter"
)
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a Hopper GPU with Triton")
# What rounding once may change, relatively.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(ROUNDING) if CUDA else [torch.float16]  # NumPy, the interpreter's base, has no bfloat16
SHAPES = [(1, 1), (3, 7), (2, 5, 48), (65, 64), (130, 300), *([(4096, 768), (1000, 1536)] if CUDA else [])]


@pytest.fixture(autouse=True)
def _enabled(monkeypatch):
    monkeypatch.setattr(gelu, "ENABLED", True)


def exact(x):
    """GELU in float64 by the complementary error function, which keeps its digits far to the left."""
    return x * torch.special.erfc(-x / 2**0.5) / 2


def exact_slope(x):
    return torch.special.erfc(-x / 2**0.5) / 2 + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5


def beyond(a):
    """Φ(−a) by the polynomial, in the precision of a, as the kernels compute it."""
    exponent = torch.full_like(a, gelu.COEFFICIENTS[-1])
    for coefficient in reversed(gelu.COEFFICIENTS[:-1]):
        exponent = exponent * a + coefficient
    return exponent.exp2()


def by_polynomial(x):
    a = x.abs().clamp(max=gelu.FARTHEST)
    return x.clamp(min=0) - a * beyond(a)


def slope_by_polynomial(x):
    a = x.abs().clamp(max=gelu.FARTHEST)
    left = beyond(a) - a * torch.exp2(-a * a * 0.7213475204444817 - 1.3257480647361593)
    return torch.where(x > 0, 1 - left, left)


def dense():
    """Numbers from −20 to 20 and tiny ones, in float32."""
    tiny = torch.logspace(-30, 0, 20_001)
    return torch.cat([torch.linspace(-20, 20, 2_000_001), tiny, -tiny])


def test_the_polynomial_is_far_closer_than_rounding():
    """To 10⁻⁵ of the value, a 48th of what rounding to float16 may change; a tail below 10⁻⁸ is only that close."""
    x = dense()
    error = (by_polynomial(x).double() - exact(x.double())).abs()
    assert (error <= 1e-5 * exact(x.double()).abs() + 1e-14 * (x.abs() > 6)).all()
    assert error.max() < 1e-6


def test_the_slope_by_the_polynomial_is_far_closer_than_rounding():
    x = dense()
    error = (slope_by_polynomial(x).double() - exact_slope(x.double())).abs()
    assert error.max() < 3e-6


def test_the_polynomial_falls_without_end():
    a = torch.linspace(0, gelu.FARTHEST, 100_001, dtype=torch.float64)
    assert (beyond(a).diff() < 0).all()
    assert beyond(a[-1]).float() * gelu.FARTHEST < 1e-37


def inputs(shape, dtype, size=3.0):
    g = torch.Generator().manual_seed(0)
    return [(scale * torch.randn(shape, generator=g)).to(DEVICE, dtype) for scale in (size, 1.0)]


def assert_rounded_once(ours, theirs):
    """Equal up to one rounding, with a little room for a polynomial that tips it over; tiny numbers to 10⁻⁷."""
    room = 1.02 * ROUNDING[ours.dtype] * theirs.abs() + 1e-7
    assert ((ours.double() - theirs).abs() <= room).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_slopes_and_sums_are_those_of_float64(shape, dtype):
    pre, grad = inputs(shape, dtype)
    assert_rounded_once(gelu.gelu(pre, None), exact(pre.double()))
    of_pre, sums = gelu.gelu_backward(grad, pre, True)
    expected = grad.double() * exact_slope(pre.double())
    # Near its zero at −0.75 the slope is a difference: the polynomial's error is then not one of rounding.
    room = 1.02 * ROUNDING[dtype] * expected.abs() + 3e-6 * grad.double().abs() + 1e-7
    assert ((of_pre.double() - expected).abs() <= room).all()
    assert sums.dtype == torch.float32
    assert sums.shape == (gelu.parts(pre), shape[-1])
    total = expected.reshape(-1, shape[-1])
    assert ((sums.double().sum(0) - total.sum(0)).abs() <= 1e-5 * total.abs().sum(0) + 1e-7).all()


@needs_kernels
def test_the_kernels_compute_that_polynomial():
    """In float32, where nothing is rounded away; on a GPU an exponential is right to some 10⁻⁷."""
    x = torch.linspace(-9, 9, 4001, device=DEVICE)[None]
    torch.testing.assert_close(gelu.gelu(x, None), by_polynomial(x), atol=5e-7, rtol=1e-6)
    slopes = gelu.gelu_backward(torch.ones_like(x), x, False)[0]
    torch.testing.assert_close(slopes, slope_by_polynomial(x), atol=5e-7, rtol=1e-6)


@needs_kernels
def test_sums_are_made_only_when_asked_for():
    pre, grad = inputs((70, 48), torch.float16)
    plain, nothing = gelu.gelu_backward(grad, pre, False)
    assert nothing.numel() == 0
    assert torch.equal(plain, gelu.gelu_backward(grad, pre, True)[0])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_inputs_give_no_nan(dtype):
    pre = torch.tensor([[-60000.0, -300.0, -16.0, -6.0, -0.0, 0.0, 6.0, 16.0, 300.0, 60000.0]]).to(DEVICE, dtype)
    assert_rounded_once(gelu.gelu(pre, None), exact(pre.double()))
    of_pre, sums = gelu.gelu_backward(torch.ones_like(pre), pre, True)
    assert torch.allclose(of_pre.double(), exact_slope(pre.double()), atol=1e-6, rtol=ROUNDING[dtype])
    assert sums.isfinite().all()
    infinite = torch.tensor([[float("inf"), float("-inf"), float("nan")]]).to(DEVICE, dtype)
    assert gelu.gelu(infinite, None)[0, :2].tolist() == [float("inf"), 0.0]
    assert gelu.gelu(infinite, None)[0, 2].isnan()
    slopes = gelu.gelu_backward(torch.ones_like(infinite), infinite, False)[0]
    assert slopes[0, :2].tolist() == [1.0, 0.0]
    assert slopes[0, 2].isnan()


@needs_kernels
@pytest.mark.parametrize("summed", [False, True])
def test_the_operations_keep_what_they_promise_a_compiler(summed):
    """No input is changed or handed back, and the fakes tell shapes, dtypes and strides, whatever order inputs have."""
    pre, grad = (tensor.transpose(0, 1) for tensor in inputs((5, 14, 48), torch.float16))
    bias = torch.zeros(48, device=DEVICE) if summed else None
    asked = ("test_schema", "test_faketensor")
    torch.library.opcheck(gelu.gelu, (pre, bias), test_utils=asked)
    torch.library.opcheck(gelu.gelu_backward, (grad, pre, summed), test_utils=asked)
    assert torch.equal(gelu.gelu(pre, bias), gelu.gelu(pre.contiguous(), bias))


def layer(inside, outside, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(inside, outside).to(DEVICE, dtype)


def gradients(run, x, parameters, grad):
    x = x.detach().requires_grad_()
    out = run(x)
    return out.detach(), *torch.autograd.grad(out, [x, *parameters], grad.to(out.dtype))


def error(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@needs_kernels
@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 65, 24), (7, 5)], ids=str)
def test_a_linear_layer_and_its_gelu_have_the_gradients_of_float64(shape, dtype, autocast):
    own = torch.float32 if autocast else dtype
    linear = layer(shape[-1], 40, own)
    x, grad = inputs(shape, own, 1.0)[0], inputs((*shape[:-1], 40), dtype)[1]
    with torch.autocast(DEVICE, dtype, enabled=autocast):
        assert gelu.is_available(x)
        found = gradients(lambda x: gelu.linear_gelu(x, linear.weight, linear.bias), x, linear.parameters(), grad)
    double = copy.deepcopy(linear).double()
    expected = gradients(lambda x: exact(double(x)), x.double(), double.parameters(), grad)
    assert [part.dtype for part in found] == [dtype, own, own, own]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < 2 * ROUNDING[dtype]


@needs_kernels
def test_a_layer_without_a_bias_or_with_one_that_is_not_trained():
    linear = layer(24, 40, torch.float16)
    x, grad = inputs((9, 24), torch.float16)[0], inputs((9, 40), torch.float16)[1]
    for bias in (None, linear.bias.detach()):
        found = gradients(lambda x, b=bias: gelu.linear_gelu(x, linear.weight, b), x, [linear.weight], grad)
        plain = gradients(lambda x, b=bias: F.gelu(F.linear(x, linear.weight, b)), x, [linear.weight], grad)
        for ours, theirs in zip(found, plain, strict=True):
            assert error(ours, theirs.double()) < 2 * ROUNDING[torch.float16]


def mlp(dropout=0.0, activation="gelu"):
    torch.manual_seed(0)
    return Mlp(24, 96, dropout, activation).to(DEVICE)


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels were asked."""
    made = []
    original = gelu.linear_gelu
    monkeypatch.setattr(gelu, "linear_gelu", lambda *a: made.append(1) or original(*a))
    return made


def step(run, model, x, dtype):
    """Output and gradients of the input and all parameters, in autocast."""
    with torch.autocast(DEVICE, dtype):
        return gradients(run, x, model.parameters(), torch.ones(*x.shape, device=DEVICE))


def assert_same(found, expected, dtype):
    assert [part.dtype for part in found] == [part.dtype for part in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs.double()) < 2 * ROUNDING[dtype]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mlp_learns_as_without_the_kernels(dtype, monkeypatch, calls):
    model, x = mlp(), inputs((3, 30, 24), torch.float32, 1.0)[0]
    found = step(model, model, x, dtype)
    assert len(calls) == 1
    monkeypatch.setattr(gelu, "ENABLED", False)
    expected = step(model, model, x, dtype)
    assert len(calls) == 1
    assert_same(found, expected, dtype)


@needs_kernels
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_compiled_mlp_is_one_graph_with_the_kernels_in_it(checkpointed):
    model, x = mlp(), inputs((3, 30, 24), torch.float32, 1.0)[0]
    expected = step(model, model, x, DTYPES[0])
    torch._dynamo.reset()
    graphs = []

    def run(x):
        return checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)

    found = step(torch.compile(run, fullgraph=True, backend=recorder(graphs)), model, x, DTYPES[0])
    assert_same(found, expected, DTYPES[0])
    (graph,) = graphs
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # a checkpoint has its own
    assert sum("acutance.gelu" in str(node.target) for part in parts for node in part.graph.nodes) == 1


@needs_kernels
def test_a_checkpointed_mlp_runs_the_kernels_again(calls):
    model, x = mlp(), inputs((3, 30, 24), torch.float32, 1.0)[0]
    expected = step(model, model, x, DTYPES[0])
    found = step(lambda x: checkpoint(model, x, use_reentrant=False), model, x, DTYPES[0])
    assert len(calls) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@needs_kernels
def test_an_exported_mlp_has_the_kernels_in_it():
    model, x = mlp().to(DTYPES[0]).eval(), inputs((3, 30, 24), DTYPES[0], 1.0)[0]
    exported = torch.export.export(model, (x,))
    assert sum("acutance.gelu" in str(node.target) for node in exported.graph.nodes) == 1
    torch.testing.assert_close(exported.module()(x), model(x))


@needs_kernels
def test_a_vit_asks_for_it_in_every_layer(calls):
    model = ViT(image_size=8, patch_size=4, dim=16, depth=3, heads=1, num_classes=3).to(DEVICE)
    images = torch.randn(2, 3, 8, 8, device=DEVICE)
    with torch.autocast(DEVICE, DTYPES[0]):
        model(images).square().mean().backward()
    assert len(calls) == 3
    assert all(block.mlp.fc1.bias.grad.abs().sum() > 0 for block in model.blocks)


@needs_kernels
@pytest.mark.parametrize(
    "case", ["float32", "float64", "empty", "relu", "tanh", "dropout", "hook", "backward hook", "other layer", "off"]
)
def test_where_it_does_not_apply_the_layers_are_called(case, calls, monkeypatch):
    model = mlp(0.1 if case == "dropout" else 0.0, "relu" if case == "relu" else "gelu")
    x = torch.randn(0 if case == "empty" else 2, 24, device=DEVICE)
    if case == "float64":
        model, x = model.double(), x.double()
    if case == "hook":
        model.fc1.register_forward_hook(lambda *_: None)
    if case == "backward hook":
        model.act.register_full_backward_hook(lambda *_: None)
    if case == "tanh":
        model.act = nn.GELU("tanh")
    if case == "other layer":
        nn.utils.parametrizations.weight_norm(model.fc1)
    monkeypatch.setattr(gelu, "ENABLED", case != "off")
    with torch.autocast(DEVICE, DTYPES[0], enabled=case != "float32"):
        model(x)
    assert not calls


@needs_kernels
def test_dropout_that_is_not_active_does_not_stand_in_the_way(calls):
    model = mlp(0.1).to(DTYPES[0]).eval()
    model(torch.randn(2, 24, device=DEVICE, dtype=DTYPES[0]))
    assert len(calls) == 1


def test_names_in_a_checkpoint_are_those_of_the_plain_layers():
    assert list(mlp().state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


@pytest.mark.skipif(packed.INTERPRETED, reason="the interpreter takes CPU tensors")
def test_on_a_cpu_pytorch_computes_it():
    assert not gelu.is_available(torch.zeros(2, 3, dtype=torch.bfloat16))


@pytest.mark.cuda
@needs_gpu
def test_the_same_inputs_give_the_same_bits():
    pre, grad = inputs((65536, 768), torch.bfloat16)
    first, again = (gelu.gelu_backward(grad, pre, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    expected = (grad.double() * exact_slope(pre.double())).sum(0)
    assert error(first[1].sum(0), expected) < 1e-5


@pytest.mark.cuda
@needs_gpu
def test_all_bfloat16_numbers_are_rounded_once():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()][None].to(DEVICE)
    assert_rounded_once(gelu.gelu(every, None), exact(every.double()))
