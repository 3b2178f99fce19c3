"""The operation behind `packed`: forward, backward, their fake versions for tracers, and the autograd formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.attention.kernels.tracing import constant_in_traces

MOST_TOKENS = 256  # of the kernels for short sequences


def unregistered_attention(
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    contrast: Tensor | None,
    residual: Tensor | None,
    constant: float,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """u, each row's log-sum for the backward pass, and what stands in for v, see `shared_values`."""
    if qkv.shape[1] > MOST_TOKENS:
        from acutance.attention.kernels.long_forward import forward
    else:
        from acutance.attention.kernels.packed_forward import forward  # type: ignore[assignment]

    with torch.cuda.device_of(qkv):  # Triton launches where the current device is
        made = forward(qkv, first, strength, contrast, residual, constant, heads, kv_heads, scale, causal)
    return *made, _stand_in(qkv, heads, kv_heads)


packed_attention = torch.library.custom_op("acutance::packed_attention", unregistered_attention, mutates_args=())


@torch.library.custom_op("acutance::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    later: Tensor | None,
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    contrast: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    constant: float,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of qkv, of v⁰ through the mixed values, and of λ, c and ρ by batch and head.

    The caller sums the last three; those not wanted are empty. `later` is added to the gradient of v.
    """
    if qkv.shape[1] > MOST_TOKENS:
        from acutance.attention.kernels.long_backward import backward
    else:
        from acutance.attention.kernels.packed_backward import backward  # type: ignore[assignment]

    numbers = (constant, heads, kv_heads, scale, causal)
    with torch.cuda.device_of(qkv):
        return backward(grad, later, qkv, first, strength, contrast, residual, out, log_sums, *numbers)


def _stand_in(qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """A tensor of v's shape in one number's memory."""
    batch, tokens, packed = qkv.shape
    return qkv.new_empty(()).expand(batch, tokens, packed // (heads + 2 * kv_heads) * kv_heads)


@packed_attention.register_fake
def _(qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = others[-4:-2]
    batch, tokens, packed = qkv.shape
    out = qkv.new_empty(batch, tokens, packed // (heads + 2 * kv_heads) * heads)
    return out, qkv.new_empty(batch, heads, tokens, dtype=torch.float32), _stand_in(qkv, heads, kv_heads)


@packed_attention_backward.register_fake
def _(
    grad: Tensor,
    later: Tensor | None,
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    contrast: Tensor | None,
    residual: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, kv_heads = others[-4:-2]
    batch, tokens, packed = qkv.shape
    values = packed // (heads + 2 * kv_heads) * kv_heads
    of_strength, of_contrast, of_residual = (
        qkv.new_empty((batch, count) if wanted is not None else 0, dtype=torch.float32)
        for wanted, count in ((strength, heads), (contrast, heads), (residual, kv_heads))
    )
    grad_first = qkv.new_empty((batch, tokens, values) if residual is not None else 0)
    return qkv.new_empty(qkv.shape), grad_first, of_strength, of_contrast, of_residual


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.constant, ctx.heads, ctx.kv_heads, ctx.scale, ctx.causal = inputs
    out, log_sums, _stand_in = output
    ctx.mark_non_differentiable(log_sums)
    ctx.set_materialize_grads(False)  # only the first layer's values are used as v⁰
    ctx.save_for_backward(*tensors, out, log_sums)


def _backward(ctx: Any, grad: Tensor | None, _: None, later: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing makes them anew
    _qkv, first, *numbers, out, _log_sums = saved
    grad = torch.zeros_like(out) if grad is None else grad.contiguous()
    later = None if later is None else later.contiguous()
    options = (ctx.constant, ctx.heads, ctx.kv_heads, ctx.scale, ctx.causal)
    grad_qkv, grad_first, *by_sample = packed_attention_backward(grad, later, *saved, *options)
    summed = (None if x is None else g.sum(0).to(x.dtype) for x, g in zip(numbers, by_sample, strict=True))
    strength, _contrast, residual = numbers
    of_first = grad_first.to(first.dtype) if residual is not None else None
    if first is not None and ctx.needs_input_grad[1] and (strength is not None or ctx.constant != 0):
        pulled = _pulled(grad, ctx.constant if strength is None else strength[:, None], ctx.heads, ctx.kv_heads)
        of_first = pulled.to(first.dtype) if of_first is None else of_first + pulled.to(first.dtype)
    return grad_qkv, of_first, *summed, None, None, None, None, None


def _pulled(grad: Tensor, strength: Tensor | float, heads: int, kv_heads: int) -> Tensor:
    """λ du, summed over the heads that share v⁰. A compiler fuses this plain arithmetic with the sum over layers."""
    by_head: Tensor = grad.unflatten(-1, (heads, -1)) * strength
    if kv_heads < heads:
        by_head = by_head.unflatten(-2, (kv_heads, -1)).sum(-2)
    return by_head.flatten(-2)


packed_attention.register_autograd(_backward, setup_context=_setup_context)


class _Shared(torch.autograd.Function):
    """Returns the values unchanged; their gradient goes to what stands in for them."""

    @staticmethod
    def forward(values: Tensor, stand_in: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


@constant_in_traces
def _is_exporting() -> bool:
    """Asked outside traced code: inside, torch.compile of torch 2.11 always says yes."""
    return torch.compiler.is_exporting()


def shared_values(qkv: Tensor, stand_in: Tensor) -> Tensor:
    """v as it stands in qkv, which later layers use as v⁰. Their summed gradient is added where dv is written.

    As the gradient of a slice it would be padded with zeros for q and k, and adding it would read and write the whole
    of dqkv once more. An exported graph knows no such function and keeps the slice.
    """
    values = qkv[..., -stand_in.shape[-1] :]
    if _is_exporting() or not stand_in.requires_grad:
        return values
    shared: Tensor = _Shared.apply(values.detach(), stand_in)  # type: ignore[no-untyped-call]
    return shared
