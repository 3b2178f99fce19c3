"""A residual sum and the LayerNorm of it in one pass over memory each way.

s = x + keep·b and LayerNorm(s) are one kernel forward. The kernel backward makes the gradients of x and b, with the one
that arrives at s added, and on the way those of γ and β, which would otherwise be passes of their own. What is kept in
between is s and two numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from acutance.kernels import packed

ENABLED = False  # whether the reference models ask for the kernels; not measured on a GPU yet
WIDEST = 1024  # channels: a token's are held in registers
PROGRAMS = 528  # at most, of the backward pass: four for each of Hopper's 132 multiprocessors
TILE = 2048  # numbers a program takes at a time, whole tokens


def is_available(x: Tensor, norm: nn.Module, branch: Tensor | None = None) -> bool:
    """Whether the kernels take this sum and this norm."""
    return (
        ENABLED
        and packed.TRITON
        and type(norm) is nn.LayerNorm
        and is_bare(norm)
        and norm.elementwise_affine
        and norm.bias is not None
        and norm.normalized_shape == x.shape[-1:]
        and x.shape[-1] <= WIDEST
        and x.numel() > 0
        and x.dtype in packed.DTYPES
        and (norm.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type))
        and (branch is None or (branch.shape == x.shape and torch.promote_types(x.dtype, branch.dtype) == x.dtype))
        and (packed.INTERPRETED or (x.is_cuda and packed._is_known(x.device.index)))
    )


def is_bare(module: nn.Module) -> bool:
    """Whether a module's work may be done without calling it: no hooks, no forward of its own, not compiled alone."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not any(hooks) and "forward" not in module.__dict__ and module._compiled_call_impl is None


def residual_norm(
    x: Tensor, norm: nn.LayerNorm, branch: Tensor | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + keep·branch in the precision of x, and the norm of that; without a branch x itself, and its norm.

    Go on with the sum that comes back, also where it is x: its gradient is then added in the kernel. Under autocast the
    norm comes in autocast's precision, which is what a linear layer would make of it.

    Args:
        x: tokens, (batch, ..., channels).
        norm: over the channels, with γ and β.
        branch: of the same shape.
        keep: one factor per sample, such as `DropPath` draws.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    keep = None if keep is None else keep.flatten()
    inputs = (x, branch, keep, norm.weight, norm.bias, norm.eps, dtype)
    total, normed = _ResidualNorm.apply(*inputs)  # type: ignore[no-untyped-call]
    return total, normed


class _ResidualNorm(torch.autograd.Function):
    """A function around the custom ops, because these may not hand back x itself, on which its gradient depends."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        keep: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        if branch is None:  # by torch: a compiler joins that to what made x
            wide, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
            total, normed = x.view_as(x), wide.to(dtype)
        else:
            total, normed, mean, rstd = residual_norm_forward(x, branch, keep, weight, bias, eps, dtype)
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.save_for_backward(x if branch is None else total, mean, rstd, weight, keep)
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight, keep = ctx.saved_tensors
        dtype = total.dtype if ctx.branch_dtype is None else ctx.branch_dtype
        grad_x, grad_branch, partial = residual_norm_backward(
            grad_total, grad_normed, total, mean, rstd, weight, keep, dtype
        )
        if ctx.branch_dtype is None:
            grad_branch = None
        elif not _is_apart(total, keep, dtype):
            grad_branch = grad_x
        of_weight, of_bias = partial.sum(0).to(weight.dtype).unbind(0)
        return grad_x, grad_branch, None, of_weight, of_bias, None, None


@torch.library.custom_op("acutance::residual_norm", mutates_args=())
def residual_norm_forward(
    x: Tensor,
    branch: Tensor,
    keep: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, its norm, and of each token the mean and 1 over the deviation."""
    from acutance.kernels import residual_norm_rows

    made: tuple[Tensor, Tensor, Tensor, Tensor] = _forward_outputs(x, branch, keep, weight, bias, eps, dtype)
    x, branch, weight, bias = (given.contiguous() for given in (x, branch, weight, bias))
    keep = None if keep is None else keep.contiguous()
    residual_norm_rows.forward(x, branch, keep, weight, bias, eps, *made)
    return made


@torch.library.custom_op("acutance::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    grad_total: Tensor,
    grad_normed: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the branch in its `dtype` (empty where it is that of x), of γ and β by program."""
    from acutance.kernels import residual_norm_rows

    made: tuple[Tensor, Tensor, Tensor] = _backward_outputs(
        grad_total, grad_normed, total, mean, rstd, weight, keep, dtype
    )
    grads = (grad_total.contiguous(), grad_normed.contiguous())
    keep = None if keep is None else keep.contiguous()
    residual_norm_rows.backward(*grads, total.contiguous(), mean, rstd, weight.contiguous(), keep, *made)
    return made


def rows_at_a_time(width: int) -> int:
    """Tokens that a program takes at a time."""
    return max(1, TILE // (1 << (width - 1).bit_length()))


def programs_for(count: int, width: int, most: int) -> int:
    """How many programs share so many tokens."""
    return min(most, -(-count // rows_at_a_time(width)))


def _is_apart(total: Tensor, keep: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the branch's gradient is another tensor than that of x."""
    return keep is not None or dtype != total.dtype


@residual_norm_forward.register_fake
def _forward_outputs(
    x: Tensor,
    branch: Tensor,
    keep: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for what the forward pass writes."""
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), mean, rstd


@residual_norm_backward.register_fake
def _backward_outputs(
    grad_total: Tensor,
    grad_normed: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what the backward pass writes."""
    width = total.shape[-1]
    programs = programs_for(mean.numel(), width, PROGRAMS)
    grad_branch = total.new_empty(total.shape if _is_apart(total, keep, dtype) else 0, dtype=dtype)
    return total.new_empty(total.shape), grad_branch, mean.new_empty(programs, 2, width)
