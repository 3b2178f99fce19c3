"""Attention with NeuTRENO's correction straight from the packed projection, for the short sequences of images.

u = softmax(q kᵀ·s) v + λ (v⁰ − v) is one kernel forward and one or two backward. They read q, k and v as the joint
projection leaves them and write what the output projection takes, and its gradient what the projection's backward pass
takes, so that no transpose, no copy and no pass for the correction remains. Where the kernels are not available the
operator gives the same result.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

MOST_TOKENS = 256  # above, the library's own attention is faster
WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_TRITON = (3, 6)  # 3.2 dies in its compiler on one of the kernels; what lies between was not tried
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs on the CPU, slowly, for tests


def _has_triton() -> bool:
    """A Triton the kernels were run with, for NVIDIA's GPUs."""
    for package in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            found = tuple(int(number) for number in re.findall(r"\d+", version(package))[:2])
            return found >= OLDEST_TRITON and torch.version.hip is None
    return False


# Asked once, outside any traced code.
TRITON = _has_triton()


def is_available(qkv: Tensor, heads: int) -> bool:
    """Whether the kernels take q, k and v (batch, tokens, 3 · heads · width) of these heads."""
    return (
        TRITON
        and (qkv.is_cuda or INTERPRETED)
        and qkv.dtype in DTYPES
        and 0 < qkv.shape[1] <= MOST_TOKENS
        and qkv.shape[-1] // (3 * heads) in WIDTHS
        and qkv.stride(-1) == 1
    )


def attention(
    qkv: Tensor,
    heads: int,
    scale: float,
    first: Tensor | None = None,
    strength: Tensor | float = 0.0,
    causal: bool = False,
) -> Tensor:
    """u as (batch, tokens, heads · width).

    Args:
        qkv: q, k and v side by side, each head after head, (batch, tokens, 3 · heads · width).
        heads: how many heads.
        scale: of the dot product.
        first: v⁰ as (batch, tokens, heads · width); None leaves the correction out.
        strength: λ, a constant or one per head.
        causal: whether a token sees only itself and earlier ones.
    """
    learnt = strength.expand(heads).contiguous() if isinstance(strength, Tensor) else None
    if first is None:
        learnt = None
    elif first.stride(-1) != 1:
        first = first.contiguous()
    constant = 0.0 if isinstance(strength, Tensor) else strength
    u: Tensor = packed_attention(qkv, first, learnt, constant, heads, scale, causal)[0]
    return u


@torch.library.custom_op("acutance::packed_attention", mutates_args=())
def packed_attention(
    qkv: Tensor, first: Tensor | None, strength: Tensor | None, constant: float, heads: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """u, and each row's log-sum, which the backward pass needs."""
    from acutance.kernels import packed_forward

    return packed_forward.forward(qkv, first, strength, constant, heads, scale, causal)


@torch.library.custom_op("acutance::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    first: Tensor | None,
    strength: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    constant: float,
    heads: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of q, k and v side by side, and of the strength by batch and head, to be summed up."""
    from acutance.kernels import packed_backward

    return packed_backward.backward(grad, qkv, first, strength, out, log_sums, constant, heads, scale, causal)


@packed_attention.register_fake
def _(
    qkv: Tensor, first: Tensor | None, strength: Tensor | None, constant: float, heads: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    batch, tokens, packed = qkv.shape
    return qkv.new_empty(batch, tokens, packed // 3), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@packed_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    heads = others[-3]
    return qkv.new_empty(qkv.shape), qkv.new_empty(qkv.shape[0], heads, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, first, strength, ctx.constant, ctx.heads, ctx.scale, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, first, strength, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, first, strength, out, log_sums = ctx.saved_tensors
    grad = grad.contiguous()
    grad_qkv, by_sample = packed_attention_backward(
        grad, qkv, first, strength, out, log_sums, ctx.constant, ctx.heads, ctx.scale, ctx.causal
    )
    grad_first = grad_strength = None
    if first is not None and ctx.needs_input_grad[1]:  # plain arithmetic, which a compiler joins to the sum over layers
        lam = ctx.constant if strength is None else strength[:, None]
        grad_first = (grad.unflatten(-1, (ctx.heads, -1)) * lam).flatten(-2).to(first.dtype)
    if strength is not None:
        grad_strength = by_sample.sum(0).to(strength.dtype)
    return grad_qkv, grad_first, grad_strength, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_setup_context)
