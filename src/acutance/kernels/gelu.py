"""A linear layer and its GELU, with the gradient of the bias made where that of the GELU is.

GELU(x) = x Φ(x) = max(x, 0) − |x| Φ(−|x|), and Φ(−a) is 2 to the power of a polynomial in a: one exponential, where an
error function in float32 takes so many instructions that the memory waits for them. Backwards, GELU'(x) times the
incoming gradient and its sums over tokens, which are the gradient of the bias, are one pass. The products stay
PyTorch's own. For bfloat16 and float16, whose rounding hides the polynomial's error; elsewhere PyTorch's GELU is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.kernels import packed

ENABLED = False  # not measured yet
DTYPES = (torch.bfloat16, torch.float16)
# log₂ Φ(−a), lowest power first: a minimax fit over 0 ≤ a ≤ 6, to 6·10⁻⁶ of Φ(−a) when computed in float32. Beyond,
# where |GELU(−a)| < 6·10⁻⁹, it falls without end, so that 2 to its power goes to zero.
COEFFICIENTS = (
    -0.9999952912330627,
    -1.1512508392333984,
    -0.45846429467201233,
    -0.05396043509244919,
    0.008508134633302689,
    -0.0009305953863076866,
    6.160775956232101e-05,
    -1.8352948245592415e-06,
)
CHUNK = 64  # rows whose gradient is summed up before it leaves the registers
FARTHEST = 16.0  # beyond, Φ(−a) is zero in float32; keeps infinities out of the polynomial


def is_available(x: Tensor) -> bool:
    """Whether `linear_gelu` takes these inputs of the linear layer, in autocast or not."""
    return ENABLED and x.numel() > 0 and packed.runs_on(x) and precision(x) in DTYPES


def precision(x: Tensor) -> torch.dtype:
    """In which a linear layer of these inputs computes."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GELU(x Wᵀ + b)."""
    # The product adds the bias but does not differentiate it: the sums come with the GELU's gradient.
    pre = F.linear(x, weight, None if bias is None else bias.detach())
    act: Tensor = gelu(pre, bias)
    return act


@torch.library.custom_op("acutance::gelu", mutates_args=())
def gelu(pre: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of `pre`, to which `bias` was added without a gradient: that comes from here."""
    from acutance.kernels import gelu_tiles

    return gelu_tiles.forward(pre.contiguous())


@torch.library.custom_op("acutance::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, pre: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """The gradient of `pre`, and in float32 its sums over parts of the tokens; empty if they are not asked for."""
    from acutance.kernels import gelu_tiles

    return gelu_tiles.backward(grad.contiguous(), pre.contiguous(), summed)


@gelu.register_fake
def _(pre: Tensor, bias: Tensor | None) -> Tensor:
    return pre.new_empty(pre.shape)


def parts(pre: Tensor) -> int:
    """Over how many parts of the tokens `gelu_backward` sums."""
    return -(-(pre.numel() // pre.shape[-1]) // CHUNK)


@gelu_backward.register_fake
def _(grad: Tensor, pre: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    sums = pre.new_empty((parts(pre), pre.shape[-1]) if summed else 0, dtype=torch.float32)
    return pre.new_empty(pre.shape), sums


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    pre, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(pre)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    (pre,) = ctx.saved_tensors
    summed = ctx.needs_input_grad[1]
    of_pre, sums = gelu_backward(grad, pre, summed)
    return of_pre, sums.sum(0).to(ctx.bias_dtype) if summed else None


gelu.register_autograd(_backward, setup_context=_setup_context)
