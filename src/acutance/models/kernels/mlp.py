"""A Transformer's MLP, y = W₂ GELU(W₁ x + b₁) + b₂, with one kernel for the forward pass.

With few channels the products around the hidden layer are bound by memory. In the forward pass the hidden layer stays
in registers between the products, and only h = W₁ x + b₁ is written, if a backward pass needs it. In the backward pass
W₂ᵀ dy is multiplied by GELU'(h) before it is written and summed over tokens for the gradient of b₁, and GELU(h) is
computed again for that of W₂. Every remaining pass over the hidden layer is a product. The others are PyTorch's own.

GELU(x) = x Φ(x) = max(x, 0) − |x| Φ(−|x|), and Φ(−a) is 2 to the power of a polynomial in a. That is one exponential,
while an error function in float32 takes many instructions. It serves bfloat16 and float16, whose rounding hides the
polynomial's error. For other dtypes the layers are called as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acutance.attention.kernels import packed
from acutance.attention.kernels.sizes import tiles_of
from acutance.attention.kernels.tracing import is_watched

DTYPES = (torch.bfloat16, torch.float16)
# log₂ Φ(−a), lowest power first: a minimax fit over 0 ≤ a ≤ 6, to 6·10⁻⁶ of Φ(−a) when computed in float32. Beyond,
# where |GELU(−a)| < 6·10⁻⁹, it falls without bound, so that 2 to its power goes to zero.
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
FARTHEST = 16.0  # Φ(−a) is zero in float32 beyond; the cut keeps infinities out of the polynomial
CHUNK = 64  # channels multiplied at a time
WIDEST = 256  # channels: a program keeps the weights of its hidden channels in shared memory


class Tile(NamedTuple):
    """How many tokens and hidden channels a tile has, and the warps, the stages of the loop and the programs.

    In the backward pass the programs share the tiles: each keeps its own hidden channels and reads their weights once.
    In the forward pass there is one program per tile of tokens.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 0
    registers: int | None = None


# Timed on an H200 at 192 channels: of six tiles, the fastest in the forward pass and within 1 % of the fastest in the
# backward pass, where three programs run on each of its 132 multiprocessors.
FORWARD = Tile(128, 64, 8, 3)
BACKWARD = Tile(64, 128, 4, 1, 396, 168)
DEEPEST = 192  # channels: with more, three stages of the forward pass do not fit into shared memory


def is_available(x: Tensor, fc1: nn.Module, fc2: nn.Module) -> bool:
    """Whether `mlp` takes these tokens and layers, in autocast or not."""
    if not (packed.runs_on(x) and x.numel() > 0 and precision(x) in DTYPES):
        return False
    if type(fc1) is not nn.Linear or type(fc2) is not nn.Linear:
        return False
    hidden, inside = fc1.weight.shape
    return (
        fc1.bias is not None
        and fc2.bias is not None
        and fc2.weight.shape == (inside, hidden)
        and x.shape[-1] == inside
        and inside % CHUNK == 0
        and inside <= WIDEST
        and hidden % max(FORWARD.columns, BACKWARD.columns) == 0
        and (fc1.weight.dtype == fc2.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type))
    )


def precision(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer computes with these inputs."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def mlp(x: Tensor, fc1: nn.Linear, fc2: nn.Linear) -> Tensor:
    """fc2(GELU(fc1(x))), in autocast's dtype if it is on."""
    dtype = precision(x)
    inputs = (x.to(dtype), fc1.weight.to(dtype), fc1.bias, fc2.weight.to(dtype), fc2.bias)
    if torch.is_grad_enabled():
        learnt: Tensor = _Mlp.apply(*inputs)  # type: ignore[no-untyped-call]
        return learnt
    made: Tensor = (mlp_forward if is_watched(x) else _forward)(*inputs, False)[0]
    return made


class _Mlp(torch.autograd.Function):
    """Autograd around the custom ops: the second product's gradient goes straight to h, past its own input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, shift: Tensor, down: Tensor, offset: Tensor) -> Tensor:
        out: Tensor
        out, pre = mlp_forward(x, up, shift, down, offset, True)
        ctx.save_for_backward(x, up, down, pre)
        ctx.dtypes = shift.dtype, offset.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, pre = ctx.saved_tensors
        of_x, of_up, of_shift, of_down, of_offset = ctx.needs_input_grad
        of_pre, sums, act = mlp_backward(grad, down, pre, of_down)
        rows = grad.flatten(0, -2)
        return (
            of_pre @ up if of_x else None,
            of_pre.flatten(0, -2).T @ x.flatten(0, -2) if of_up else None,
            sums.sum(0).to(ctx.dtypes[0]) if of_shift else None,
            rows.T @ act.flatten(0, -2) if of_down else None,
            rows.sum(0, dtype=torch.float32).to(ctx.dtypes[1]) if of_offset else None,
        )


def _forward(x: Tensor, up: Tensor, shift: Tensor, down: Tensor, offset: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
    """GELU(h) Wᵀ + c with W = `down` and c = `offset`, and h, which is empty unless `kept`."""
    from acutance.models.kernels import mlp_tiles

    out, pre = _forward_outputs(x, up, shift, down, offset, kept)
    x, up, shift, down, offset = (tensor.contiguous() for tensor in (x, up, shift, down, offset))
    tile = FORWARD if x.shape[-1] <= DEEPEST else FORWARD._replace(stages=2)
    mlp_tiles.forward(x, up, shift, down, offset, out, pre, tile)
    return out, pre


mlp_forward = torch.library.custom_op("acutance::mlp_forward", _forward, mutates_args=())


@torch.library.custom_op("acutance::mlp_backward", mutates_args=())
def mlp_backward(grad: Tensor, weight: Tensor, pre: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, its sums over every `BACKWARD.rows` tokens in float32, and GELU(h).

    It is given the gradient of GELU(h) Wᵀ. GELU(h) is empty unless it is computed `again`.
    """
    from acutance.models.kernels import mlp_tiles

    of_pre, sums, act = _backward_outputs(grad, weight, pre, again)
    mlp_tiles.backward(grad.contiguous(), weight.contiguous(), pre.contiguous(), of_pre, sums, act, BACKWARD)
    return of_pre, sums, act


@mlp_forward.register_fake
def _forward_outputs(
    x: Tensor, up: Tensor, shift: Tensor, down: Tensor, offset: Tensor, kept: bool
) -> tuple[Tensor, Tensor]:
    """Empty outputs of the forward pass."""
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], up.shape[0]) if kept else 0)


@mlp_backward.register_fake
def _backward_outputs(grad: Tensor, weight: Tensor, pre: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of the backward pass."""
    width = pre.shape[-1]
    parts = tiles_of(pre.numel() // width, BACKWARD.rows)
    sums = pre.new_empty((parts, width), dtype=torch.float32)
    return pre.new_empty(pre.shape), sums, pre.new_empty(pre.shape if again else 0)
