"""The MLP's kernels by themselves against float64, and the polynomial for their GELU.

On a GPU, and on the CPU in Triton's interpreter, which needs triton and TRITON_INTERPRET=1: `make test` runs this
folder a second time so.
"""

import pytest
import torch
from mlp_cases import (
    ADDING,
    DTYPES,
    LOW,
    ROUNDING,
    SHAPES,
    STEEPEST,
    draw,
    exact,
    exact_slope,
    needs_gpu,
    padded,
)
from mlp_cases import few_programs as few_programs
from packed_cases import DEVICE, needs_kernels

from acutance.models.kernels import mlp


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


def test_the_polynomial_is_far_closer_than_rounding():
    """To 10⁻⁵ of the value, a 48th of what rounding to float16 may change; a tail below 10⁻⁸ is only that close."""
    tiny = torch.logspace(-30, 0, 20_001)
    x = torch.cat([torch.linspace(-20, 20, 2_000_001), tiny, -tiny])
    error = (by_polynomial(x).double() - exact(x.double())).abs()
    assert (error <= 1e-5 * exact(x.double()).abs() + 1e-14 * (x.abs() > 6)).all()
    assert error.max() < 1e-6
    assert (slope_by_polynomial(x).double() - exact_slope(x.double())).abs().max() < 3e-6


def test_the_polynomial_falls_without_end():
    a = torch.linspace(0, mlp.FARTHEST, 100_001, dtype=torch.float64)
    assert (beyond(a).diff() < 0).all()
    assert beyond(a[-1]).float() * mlp.FARTHEST < 1e-37


def through_the_kernels(values, dtype):
    """GELU and its slope as the kernels have them, for h as it was kept and a gradient of one."""
    count = len(values)
    nothing, one = torch.zeros(1, 64, device=DEVICE, dtype=dtype), torch.ones(1, device=DEVICE, dtype=dtype)
    grad = torch.cat([one, nothing[0, 1:]])[None]
    slopes, _, act = mlp.mlp_backward(grad, grad.T.expand(64, count), values.to(dtype)[None], True)
    return act[0], slopes[0]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_compute_that_polynomial(dtype):
    """Rounded once; an exponential on a GPU is right to some 10⁻⁷."""
    x = torch.linspace(-9, 9, 1024, device=DEVICE).to(dtype).float()
    act, slopes = through_the_kernels(x, dtype)
    for ours, theirs in ((act, by_polynomial(x)), (slopes, slope_by_polynomial(x))):
        torch.testing.assert_close(ours.float(), theirs, rtol=1.01 * ROUNDING[dtype], atol=5e-7)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers_give_no_nan_that_was_not_there(dtype):
    large = [-60000.0, -300.0, -16.0, -6.0, -0.0, 0.0, 6.0, 16.0, 300.0, 60000.0]
    endless = [float("inf"), float("-inf"), float("nan")]
    x = torch.tensor([*large, *endless, *[1.0] * (128 - 13)], device=DEVICE).to(dtype)
    act, slopes = through_the_kernels(x, dtype)
    finite = x[:10].double()
    torch.testing.assert_close(act[:10].double(), exact(finite), rtol=ROUNDING[dtype], atol=1e-7)
    torch.testing.assert_close(slopes[:10].double(), exact_slope(finite), rtol=ROUNDING[dtype], atol=1e-6)
    assert act[10:12].tolist() == [float("inf"), 0.0]
    assert slopes[10:12].tolist() == [1.0, 0.0]
    assert act[12].isnan()
    assert slopes[12].isnan()


@pytest.mark.cuda
@needs_gpu
def test_all_bfloat16_numbers_are_rounded_once():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()].to(DEVICE)
    act, _ = through_the_kernels(every, torch.bfloat16)
    theirs = exact(every.double())
    assert ((act.double() - theirs).abs() <= 1.02 * ROUNDING[torch.bfloat16] * theirs.abs() + 1e-7).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_the_hidden_layer_and_its_sums_are_those_of_float64(shape, dtype):
    rows, inside, hidden = shape
    grad = padded(draw(rows, inside, dtype=dtype))
    weight = draw(inside, hidden, dtype=dtype, size=1 / inside**0.5, seed=1)
    pre = padded(draw(rows, hidden, dtype=dtype, size=2.0, seed=2))
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


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_forward_pass_is_that_of_float64(shape, dtype):
    """h, GELU(h) and the output are rounded once each, and no more is lost than that comes to."""
    rows, inside, hidden = shape
    x = padded(draw(rows, inside, dtype=dtype))
    up = draw(hidden, inside, dtype=dtype, size=2 / inside**0.5, seed=1)
    down = draw(inside, hidden, dtype=dtype, size=1 / hidden**0.5, seed=2)
    shift, offset = draw(hidden, dtype=torch.float32, seed=3), draw(inside, dtype=torch.float32, seed=4)
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


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_made_again_has_the_bits_of_what_was_multiplied(dtype):
    x, up, shift = draw(70, 64, dtype=dtype), draw(128, 64, dtype=dtype, seed=1), draw(128, dtype=dtype, seed=2)
    chosen = torch.eye(64, 128, device=DEVICE, dtype=dtype)
    act, pre = mlp.mlp_forward(x, up, shift, chosen, torch.zeros_like(shift[:64]), True)
    _, _, again = mlp.mlp_backward(x, chosen, pre, True)
    assert torch.equal(act, again[:, :64])


@needs_kernels
@pytest.mark.parametrize("tile", [mlp.Tile(128, 64, 8, 2, 6), mlp.Tile(64, 128, 4, 1, 10**6)], ids=str)
def test_the_cut_does_not_change_the_numbers(tile, monkeypatch):
    x, up = draw(150, 64, dtype=LOW), draw(128, 64, dtype=LOW, seed=1)
    down, bias = draw(64, 128, dtype=LOW, size=0.1, seed=2), draw(128, dtype=LOW, seed=3)
    inputs = (x, up, bias, down, bias[:64], True)
    out, pre = mlp.mlp_forward(*inputs)
    of_pre, sums, again = mlp.mlp_backward(x, down, pre, True)
    monkeypatch.setattr(mlp, "FORWARD", tile)
    monkeypatch.setattr(mlp, "BACKWARD", tile)
    *others, other_sums, other_again = (*mlp.mlp_forward(*inputs), *mlp.mlp_backward(x, down, pre, True))
    for ours, other in zip((out, pre, of_pre), others, strict=True):
        torch.testing.assert_close(other, ours, rtol=2 * ROUNDING[LOW], atol=1e-5)
    torch.testing.assert_close(other_sums.sum(0), sums.sum(0), rtol=1e-4, atol=1e-3)
    assert torch.equal(other_again, again)


@needs_kernels
def test_inputs_may_lie_in_any_order():
    x, up, bias = draw(64, 70, dtype=LOW).T, draw(64, 128, dtype=LOW, seed=1).T, draw(256, dtype=LOW, seed=3)[::2]
    down, offset = draw(128, 64, dtype=LOW, seed=2).T, draw(128, dtype=LOW, seed=4)[::2]
    inputs = (x, up, bias, down, offset)
    plain = mlp.mlp_forward(*(tensor.contiguous() for tensor in inputs), True)
    assert all(map(torch.equal, mlp.mlp_forward(*inputs, True), plain))
    pre = plain[1].T.contiguous().T
    expected = mlp.mlp_backward(x.contiguous(), down.contiguous(), plain[1], True)
    found = mlp.mlp_backward(x, down, pre, True)
    assert all(map(torch.equal, found, expected))
    assert found[0].is_contiguous()  # as the fake says


@needs_kernels
@pytest.mark.parametrize("op", ["mlp_forward", "mlp_backward"])
def test_the_operations_keep_what_they_promise_a_compiler(op):
    """No input is changed or handed back, and the fakes tell shapes, dtypes and strides as they are."""
    x, weight, bias = draw(2, 35, 64, dtype=LOW), draw(128, 64, dtype=LOW), draw(128, dtype=torch.float32)
    down, pre = weight.T.contiguous(), draw(2, 35, 128, dtype=LOW)
    inputs = {"mlp_forward": (x, weight, bias, down, bias[:64].clone(), True), "mlp_backward": (x, down, pre, True)}
    torch.library.opcheck(getattr(mlp, op), inputs[op], test_utils=("test_schema", "test_faketensor"))
