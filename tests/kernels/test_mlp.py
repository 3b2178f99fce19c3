"""The MLP's kernels against float64, the polynomial for their GELU, and the MLP against autocast's own layers."""

import copy
import math

import pytest
import torch
from kernel_cases import CUDA, DEVICE, each, error, kernels_in, needs_gpu, needs_kernels, random, recorder
from torch import nn
from torch.utils.checkpoint import checkpoint

from acutance.models import ViT
from acutance.models.block import Mlp
from acutance.models.kernels import mlp

pytestmark = needs_kernels
# What rounding once may change, relatively.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ADDING = 2.0**-20  # what adding up products in float32 may lose, as a part of the sum of their magnitudes
STEEPEST = 1.13  # the GELU's slope
DTYPES = list(ROUNDING) if CUDA else [torch.float16]  # NumPy, the interpreter's base, has no bfloat16
LOW = DTYPES[0]
dtype = each(DTYPES)
# Tokens, channels, hidden channels: tokens that fill the tiles and that do not, one to four chunks of channels.
SHAPES = [(1, 64, 128), (150, 192, 256), (128, 256, 128), *([(65536, 192, 768), (1000, 128, 512)] if CUDA else [])]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Two a column on a CPU, so that some go through several tiles, and not equally many."""
    if not CUDA:
        monkeypatch.setattr(mlp, "BACKWARD", mlp.BACKWARD._replace(programs=4))


def exact(x):
    """GELU in float64 by the complementary error function, which keeps its digits far to the left."""
    return x * torch.special.erfc(-x / 2**0.5) / 2


def exact_slope(x):
    return torch.special.erfc(-x / 2**0.5) / 2 + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5


def padded(tensor):
    """The same numbers with no-numbers behind them, which must not be read."""
    return torch.cat([tensor, torch.full_like(tensor[:1], float("nan"))])[:-1]


def beyond(a):
    """Φ(−a) by the polynomial, in the precision of a, as the kernels compute it."""
    exponent = torch.full_like(a, mlp.COEFFICIENTS[-1])
    for coefficient in reversed(mlp.COEFFICIENTS[:-1]):
        exponent = exponent * a + coefficient
    return exponent.exp2()


def by_polynomial(x):
    a = x.abs().clamp(max=mlp.FARTHEST)
    return x.clamp(min=0) - a * beyond(a)


def slope_by_polynomial(x):
    a = x.abs().clamp(max=mlp.FARTHEST)
    left = beyond(a) - a * torch.exp2(-a * a * 0.7213475204444817 - 1.3257480647361593)
    return torch.where(x > 0, 1 - left, left)


def test_the_polynomial_is_far_closer_than_rounding_and_falls_without_end():
    """To 10⁻⁵ of the value, a 48th of what rounding to float16 may change; a tail below 10⁻⁸ is only that close."""
    tiny = torch.logspace(-30, 0, 20_001)
    x = torch.cat([torch.linspace(-20, 20, 2_000_001), tiny, -tiny])
    difference = (by_polynomial(x).double() - exact(x.double())).abs()
    assert (difference <= 1e-5 * exact(x.double()).abs() + 1e-14 * (x.abs() > 6)).all()
    assert difference.max() < 1e-6
    assert (slope_by_polynomial(x).double() - exact_slope(x.double())).abs().max() < 3e-6
    a = torch.linspace(0, mlp.FARTHEST, 100_001, dtype=torch.float64)
    assert (beyond(a).diff() < 0).all()
    assert beyond(a[-1]).float() * mlp.FARTHEST < 1e-37


def through_the_kernels(values, dtype):
    """GELU and its slope as the kernels have them, for h as it was kept and a gradient of one."""
    grad = torch.eye(1, 64, device=DEVICE, dtype=dtype)
    slopes, _, act = mlp.mlp_backward(grad, grad.T.expand(64, len(values)), values.to(dtype)[None], True)
    return act[0], slopes[0]


def test_the_kernels_compute_that_polynomial(dtype):
    """Rounded once; an exponential on a GPU is right to some 10⁻⁷."""
    x = torch.linspace(-9, 9, 1024, device=DEVICE).to(dtype).float()
    act, slopes = through_the_kernels(x, dtype)
    for ours, theirs in ((act, by_polynomial(x)), (slopes, slope_by_polynomial(x))):
        torch.testing.assert_close(ours.float(), theirs, rtol=1.01 * ROUNDING[dtype], atol=5e-7)


def test_extreme_numbers_give_no_nan_that_was_not_there(dtype):
    large = [-60000.0, -300.0, -16.0, -6.0, -0.0, 0.0, 6.0, 16.0, 300.0, 60000.0]
    x = torch.tensor([*large, math.inf, -math.inf, math.nan, *[1.0] * (128 - 13)], device=DEVICE).to(dtype)
    act, slopes = (found.double() for found in through_the_kernels(x, dtype))
    finite, ends = x[:10].double(), torch.tensor([[math.inf, 0, math.nan], [1, 0, math.nan]], device=DEVICE).double()
    torch.testing.assert_close(act[:10], exact(finite), rtol=ROUNDING[dtype], atol=1e-7)
    torch.testing.assert_close(slopes[:10], exact_slope(finite), rtol=ROUNDING[dtype], atol=1e-6)
    torch.testing.assert_close(torch.stack([act, slopes])[:, 10:13], ends, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@needs_gpu
def test_all_bfloat16_numbers_are_rounded_once():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()].to(DEVICE)
    act, _ = through_the_kernels(every, torch.bfloat16)
    theirs = exact(every.double())
    assert ((act.double() - theirs).abs() <= 1.02 * ROUNDING[torch.bfloat16] * theirs.abs() + 1e-7).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_the_hidden_layer_and_its_sums_are_those_of_float64(shape, dtype):
    rows, inside, hidden = shape
    grad = padded(random(rows, inside, dtype=dtype))
    weight = random(inside, hidden, dtype=dtype, size=1 / inside**0.5, seed=1)
    pre = padded(random(rows, hidden, dtype=dtype, size=2.0, seed=2))
    of_pre, sums, again = mlp.mlp_backward(grad, weight, pre, True)
    product = grad.double() @ weight.double()
    expected = product * exact_slope(pre.double())
    # Near its zero at −0.75 the slope is a difference: the polynomial's error is then not one of rounding.
    lost = STEEPEST * ADDING * (grad.double().abs() @ weight.double().abs()) + 3e-6 * product.abs()
    assert ((of_pre.double() - expected).abs() <= 1.02 * ROUNDING[dtype] * expected.abs() + lost + 1e-7).all()
    assert sums.dtype == torch.float32
    assert sums.shape == (-(-rows // mlp.BACKWARD.rows), hidden)
    assert ((sums.double().sum(0) - expected.sum(0)).abs() <= 2e-5 * expected.abs().sum(0) + 1e-6).all()
    torch.testing.assert_close(again.double(), exact(pre.double()), rtol=1.02 * ROUNDING[dtype], atol=1e-6)
    without = mlp.mlp_backward(grad, weight, pre, False)
    assert torch.equal(without[0], of_pre)
    assert without[2].numel() == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_forward_pass_is_that_of_float64(shape, dtype):
    """h, GELU(h) and the output are rounded once each, and no more is lost than that comes to."""
    rows, inside, hidden = shape
    x = padded(random(rows, inside, dtype=dtype))
    up = random(hidden, inside, dtype=dtype, size=2 / inside**0.5, seed=1)
    down = random(inside, hidden, dtype=dtype, size=1 / hidden**0.5, seed=2)
    shift, offset = random(hidden, seed=3), random(inside, seed=4)
    out, pre = mlp.mlp_forward(x, up, shift, down, offset, True)
    h = x.double() @ up.double().T + shift.double()
    of_h = 1.02 * ROUNDING[dtype] * h.abs() + ADDING * (x.double().abs() @ up.double().abs().T + shift.double().abs())
    assert ((pre.double() - h).abs() <= of_h).all()
    act = exact(h)
    of_act = STEEPEST * of_h + 1.02 * ROUNDING[dtype] * (act.abs() + of_h) + 1e-7
    expected = act @ down.double().T + offset.double()
    magnitude = act.abs() @ down.double().abs().T + offset.double().abs()
    of_out = of_act @ down.double().abs().T + ADDING * magnitude + 1.02 * ROUNDING[dtype] * expected.abs()
    assert ((out.double() - expected).abs() <= of_out).all()
    alone, nothing = mlp.mlp_forward(x, up, shift, down, offset, False)
    assert torch.equal(alone, out)
    assert nothing.numel() == 0


def test_what_is_made_again_has_the_bits_of_what_was_multiplied(dtype):
    x, up, shift = random(70, 64, dtype=dtype), random(128, 64, dtype=dtype, seed=1), random(128, dtype=dtype, seed=2)
    chosen = torch.eye(64, 128, device=DEVICE, dtype=dtype)
    act, pre = mlp.mlp_forward(x, up, shift, chosen, torch.zeros_like(shift[:64]), True)
    _, _, again = mlp.mlp_backward(x, chosen, pre, True)
    assert torch.equal(act, again[:, :64])


def test_inputs_may_lie_in_any_order():
    x, up, bias = random(64, 70, dtype=LOW).T, random(64, 128, dtype=LOW, seed=1).T, random(256, dtype=LOW, seed=3)[::2]
    down, offset = random(128, 64, dtype=LOW, seed=2).T, random(128, dtype=LOW, seed=4)[::2]
    inputs = (x, up, bias, down, offset)
    plain = mlp.mlp_forward(*(tensor.contiguous() for tensor in inputs), True)
    assert all(map(torch.equal, mlp.mlp_forward(*inputs, True), plain))
    pre = plain[1].T.contiguous().T
    expected = mlp.mlp_backward(x.contiguous(), down.contiguous(), plain[1], True)
    found = mlp.mlp_backward(x, down, pre, True)
    assert all(map(torch.equal, found, expected))
    assert found[0].is_contiguous()  # as the fake says


@pytest.mark.parametrize("op", ["mlp_forward", "mlp_backward"])
def test_the_operations_keep_what_they_promise_a_compiler(op):
    """No input is changed or handed back, and the fakes tell shapes, dtypes and strides as they are."""
    x, weight, bias = random(2, 35, 64, dtype=LOW), random(128, 64, dtype=LOW), random(128)
    down, pre = weight.T.contiguous(), random(2, 35, 128, dtype=LOW)
    inputs = {"mlp_forward": (x, weight, bias, down, bias[:64].clone(), True), "mlp_backward": (x, down, pre, True)}
    torch.library.opcheck(getattr(mlp, op), inputs[op], test_utils=("test_schema", "test_faketensor"))


def model(dropout=0.0, activation=nn.GELU, dim=64, hidden=128):
    torch.manual_seed(0)
    made = Mlp(dim, hidden, dropout, activation).to(DEVICE)
    with torch.no_grad():
        made.fc1.weight.mul_(3)  # so that the GELU bends
    return made


@pytest.fixture
def calls(monkeypatch):
    """Each use of the kernels."""
    made = []
    original = mlp.mlp
    monkeypatch.setattr(mlp, "mlp", lambda *a: made.append("mlp") or original(*a))
    return made


def step(run, layers, x, dtype=LOW, autocast=True):
    """Output and gradients of the input and all parameters that have one."""
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE, dtype, enabled=autocast):
        out = run(x)
    grad, learnt = random(*out.shape, dtype=out.dtype, seed=5), [p for p in layers.parameters() if p.requires_grad]
    return out.detach(), *torch.autograd.grad(out, [x, *learnt], grad)


@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
def test_an_mlp_has_the_gradients_of_float64_and_is_no_further_from_it_than_pytorch(
    dtype, autocast, monkeypatch, calls
):
    own = torch.float32 if autocast else dtype
    layers, x = model(dim=192, hidden=256).to(own), random(2, 65, 192, dtype=own)
    found = step(layers, layers, x, dtype, autocast)
    assert calls == ["mlp"]
    monkeypatch.setattr(mlp, "is_available", lambda *_: False)
    plain = step(layers, layers, x, dtype, autocast)
    assert calls == ["mlp"]
    double = copy.deepcopy(layers).double()
    x64 = x.double().requires_grad_()
    out = double.fc2(exact(double.fc1(x64)))
    grad = random(*out.shape, dtype=dtype, seed=5).double()
    expected = out, *torch.autograd.grad(out, [x64, *double.parameters()], grad)
    assert [part.dtype for part in found] == [part.dtype for part in plain] == [dtype, *[own] * 5]
    for ours, theirs, right in zip(found, plain, expected, strict=True):
        assert ours.shape == right.shape
        assert error(ours, right) < 2 * ROUNDING[dtype]
        assert error(ours, right) < 1.1 * error(theirs, right) + 0.1 * ROUNDING[dtype]


def test_frozen_parameters_get_no_gradient():
    layers, x = model(), random(70, 64)
    everything = step(layers, layers, x)
    for place, frozen in enumerate(layers.parameters(), 2):
        frozen.requires_grad_(False)
        expected = [*everything[:place], *everything[place + 1 :]]
        assert all(map(torch.equal, step(layers, layers, x), expected))
        frozen.requires_grad_()


def test_without_gradients_nothing_is_kept(monkeypatch):
    layers, x = model().to(LOW), random(70, 64, dtype=LOW)
    kept = []
    for name in ("mlp_forward", "_forward"):  # the operation, and what is called where nobody looks
        original = getattr(mlp, name)
        monkeypatch.setattr(mlp, name, lambda *a, name=name, run=original: kept.append((name, a[-1])) or run(*a))
    learning = layers(x)
    with torch.no_grad():
        assert torch.equal(layers(x), learning)
    assert kept == [("mlp_forward", True), ("_forward", False)]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_compiled_mlp_is_one_graph_with_the_kernels_in_it(checkpointed):
    layers, x = model(), random(3, 30, 64)
    expected = step(layers, layers, x)
    torch._dynamo.reset()
    graphs = []

    def run(x):
        return checkpoint(layers, x, use_reentrant=False) if checkpointed else layers(x)

    found = step(torch.compile(run, fullgraph=True, backend=recorder(graphs)), layers, x)
    assert [part.dtype for part in found] == [part.dtype for part in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 2 * ROUNDING[LOW]
    (graph,) = graphs
    assert kernels_in(graph, "mlp_forward") == 1


def test_a_vit_asks_for_it_in_every_layer(calls):
    vit = ViT(image_size=8, patch_size=4, dim=64, depth=3, heads=1, num_classes=3, mlp_ratio=2).to(DEVICE)
    images = random(2, 3, 8, 8)
    with torch.autocast(DEVICE, LOW):
        vit(images).square().mean().backward()
    assert calls == ["mlp"] * 3
    assert all(parameter.grad.abs().sum() > 0 for block in vit.blocks for parameter in block.mlp.parameters())


SIZES = {"channels": (48, 128), "many channels": (320, 128), "hidden": (64, 192)}
CHANGES = {  # of an MLP, after which it is not plain
    **{
        name: lambda m, name=name: getattr(m, name).register_forward_hook(print)
        for name in ("fc1", "act", "fc2", "drop")
    },
    "backward hook": lambda m: m.act.register_full_backward_hook(print),
    "own forward": lambda m: setattr(m.fc2, "forward", m.fc2.forward),
    "tanh": lambda m: setattr(m, "act", nn.GELU("tanh")),
    "other layer": lambda m: nn.utils.parametrizations.weight_norm(m.fc2),
    "another class": lambda m: setattr(m, "fc1", nn.Sequential(m.fc1)),
    "no bias": lambda m: setattr(m.fc2, "bias", None),
}


@pytest.mark.parametrize("case", ["float32", "float64", "empty", "relu", "dropout", *CHANGES, *SIZES])
def test_where_it_does_not_apply_the_layers_are_called(case, calls):
    activation = nn.ReLU if case == "relu" else nn.GELU
    layers = model(0.1 if case == "dropout" else 0.0, activation, *SIZES.get(case, (64, 128)))
    CHANGES.get(case, id)(layers)
    x = random(0 if case == "empty" else 3, layers.fc2.out_features)
    if case == "float64":
        layers, x = layers.double(), x.double()
    with torch.autocast(DEVICE, LOW, enabled=case != "float32"):
        assert layers(x).shape == x.shape
    assert not calls


def test_dropout_that_is_not_active_does_not_stand_in_the_way(calls):
    model(0.1).to(LOW).eval()(random(3, 64, dtype=LOW))
    assert calls == ["mlp"]
    with pytest.raises(RuntimeError, match="dtype"):  # layers of another precision
        model()(random(3, 64, dtype=LOW))
    assert list(model().state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


@pytest.mark.cuda
@needs_gpu
def test_the_same_inputs_give_the_same_bits_and_a_cuda_graph_replays_them():
    layers, x = model(dim=192, hidden=768), random(512, 65, 192)
    expected, again = (step(layers, layers, x, torch.bfloat16) for _ in range(2))
    assert all(map(torch.equal, expected, again))
    run = torch.compile(layers, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [part.clone() for part in step(run, layers, x, torch.bfloat16)]
    assert all(error(a, b) < 2 * ROUNDING[torch.bfloat16] for a, b in zip(found, expected, strict=True))
