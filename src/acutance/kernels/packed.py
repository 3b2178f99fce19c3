"""Attention and what mitigations add to it straight from the packed projection.

u = c·A w + (1 − c)·U w + λ (v⁰ − w), A = softmax(q kᵀ·s), w = v + ρ (v⁰ − v), is one kernel forward and one or two
backward. They read q, k and v as the joint projection leaves them and write what the output projection takes, and its
gradient what the projection's backward pass takes, so that no transpose, no copy and no pass for the correction
remains. Where the kernels are not available the operator gives the same result.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from acutance.errors import ShapeError
from acutance.kernels.epilogue import Epilogue

MOST_TOKENS = 256  # of the kernels for short sequences
# The widths of a head, by the bytes of a number, for which they are asked. In float32 wider ones do not fit into the
# registers and compile for minutes. For long sequences they are not: the tiles that were fastest, at a width of 64 in
# 16 bits, have been timed on a GPU but not compared with the formula there.
WIDTHS = {2: (16, 32, 64, 128), 4: (16, 32)}
LONG_WIDTHS: dict[int, tuple[int, ...]] = {}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_TRITON = (3, 6)  # 3.2 dies in its compiler on one of the kernels; what lies between was not tried
CAPABILITY = (9, 0)  # Hopper, where the kernels were tried and timed
ANY_GPU = os.environ.get("ACUTANCE_KERNELS") == "1"  # asks for the kernels on NVIDIA's other GPUs too
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_known(gpu: int | None) -> bool:
    """Whether the kernels may run on this GPU."""
    return ANY_GPU or torch.cuda.get_device_capability(gpu) == CAPABILITY


def runs_on(x: Tensor) -> bool:
    """Whether Triton's kernels may run where this tensor lies."""
    return TRITON and (INTERPRETED or (x.is_cuda and _is_known(x.device.index)))


def is_available(qkv: Tensor, heads: int, kv_heads: int | None = None) -> bool:
    """Whether the kernels take q, k and v (batch, tokens, (heads + 2 · kv_heads) · width) of these heads."""
    width, rest = divmod(qkv.shape[-1], heads + 2 * (kv_heads or heads))
    widths = WIDTHS if qkv.shape[1] <= MOST_TOKENS else LONG_WIDTHS
    return (
        qkv.dtype in DTYPES
        and qkv.shape[1] > 0
        and (width in widths.get(qkv.dtype.itemsize, ()) and rest == 0)
        and qkv.stride(-1) == 1
        and runs_on(qkv)
    )


def takes(epilogue: Epilogue, tokens: int) -> bool:
    """Whether the kernels for so many tokens add what is asked; those for long sequences know the correction alone."""
    return epilogue.is_correction or tokens <= MOST_TOKENS


def attention(
    qkv: Tensor,
    heads: int,
    scale: float,
    first: Tensor | None = None,
    strength: Tensor | float = 0.0,
    causal: bool = False,
    contrast: Tensor | None = None,
    residual: Tensor | float = 0.0,
    kv_heads: int | None = None,
) -> Tensor:
    """u as (batch, tokens, heads · width).

    Args:
        qkv: q, k and v side by side, each head after head, (batch, tokens, (heads + 2 · kv_heads) · width).
        heads: how many heads of queries.
        scale: of the dot product.
        first: v⁰ as (batch, tokens, kv_heads · width); None leaves the correction and the mixing out.
        strength: λ, a constant or one per head.
        causal: whether a token sees only itself and earlier ones.
        contrast: c, one per head; None is 1.
        residual: ρ, a constant or one per head of keys.
        kv_heads: how many heads of keys and values, each shared by as many successive heads of queries; None: `heads`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads or qkv.shape[-1] % (heads + 2 * kv_heads):
        raise ShapeError(
            f"qkv {tuple(qkv.shape)} does not hold {heads} heads of queries and {kv_heads} of keys and of values: the "
            "last dimension is (heads + 2 · kv_heads) · width, and heads a multiple of kv_heads"
        )
    constant = 0.0 if isinstance(strength, Tensor) else strength
    by_head = strength.expand(heads).contiguous() if isinstance(strength, Tensor) and first is not None else None
    share = None if first is None else _shares(residual, kv_heads, qkv)
    if qkv.shape[1] > MOST_TOKENS and not (contrast is None and share is None):
        raise ShapeError(
            f"{qkv.shape[1]} tokens: above {MOST_TOKENS} the kernels add the correction alone; use the operator for a "
            "contrast or a residual"
        )
    if first is not None and first.stride(-1) != 1:
        first = first.contiguous()
    contrast = None if contrast is None else contrast.expand(heads).contiguous()
    u: Tensor = packed_attention(qkv, first, by_head, contrast, share, constant, heads, kv_heads, scale, causal)[0]
    return u


def _shares(residual: Tensor | float, kv_heads: int, qkv: Tensor) -> Tensor | None:
    """ρ per head; None where there is nothing to mix."""
    if isinstance(residual, Tensor):
        return residual.expand(kv_heads).contiguous()
    return None if residual == 0 else torch.full((kv_heads,), residual, dtype=torch.float32, device=qkv.device)


@torch.library.custom_op("acutance::packed_attention", mutates_args=())
def packed_attention(
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
) -> tuple[Tensor, Tensor]:
    """u, and each row's log-sum, which the backward pass needs."""
    if qkv.shape[1] > MOST_TOKENS:
        from acutance.kernels import long_forward

        return long_forward.forward(qkv, first, strength, constant, heads, kv_heads, scale, causal)
    from acutance.kernels import packed_forward

    return packed_forward.forward(qkv, first, strength, contrast, residual, constant, heads, kv_heads, scale, causal)


@torch.library.custom_op("acutance::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
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
    """The gradients of q, k and v side by side; of v⁰ by way of the mixed values; of λ, c and ρ by batch and head.

    The last three are to be summed up; what is not asked for is empty.
    """
    if qkv.shape[1] > MOST_TOKENS:
        from acutance.kernels import long_backward

        grad_qkv, by_sample = long_backward.backward(
            grad, qkv, first, strength, out, log_sums, constant, heads, kv_heads, scale, causal
        )
        nothing = log_sums.new_empty(0)
        by_sample = nothing if strength is None else by_sample
        return grad_qkv, qkv.new_empty(0), by_sample, nothing.clone(), nothing.clone()
    from acutance.kernels import packed_backward

    return packed_backward.backward(
        grad, qkv, first, strength, contrast, residual, out, log_sums, constant, heads, kv_heads, scale, causal
    )


@packed_attention.register_fake
def _(qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    heads, kv_heads = others[-4:-2]
    batch, tokens, packed = qkv.shape
    out = qkv.new_empty(batch, tokens, packed // (heads + 2 * kv_heads) * heads)
    return out, qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@packed_attention_backward.register_fake
def _(
    grad: Tensor,
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.constant, ctx.heads, ctx.kv_heads, ctx.scale, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # to be asked for once: checkpointing makes them anew
    _qkv, first, *numbers, _out, _log_sums = saved
    grad = grad.contiguous()
    options = (ctx.constant, ctx.heads, ctx.kv_heads, ctx.scale, ctx.causal)
    grad_qkv, grad_first, *by_sample = packed_attention_backward(grad, *saved, *options)
    summed = (None if x is None else g.sum(0).to(x.dtype) for x, g in zip(numbers, by_sample, strict=True))
    strength, _contrast, residual = numbers
    of_first = grad_first.to(first.dtype) if residual is not None else None
    if first is not None and ctx.needs_input_grad[1] and (strength is not None or ctx.constant != 0):
        pulled = _pulled(grad, ctx.constant if strength is None else strength[:, None], ctx.heads, ctx.kv_heads)
        of_first = pulled.to(first.dtype) if of_first is None else of_first + pulled.to(first.dtype)
    return grad_qkv, of_first, *summed, None, None, None, None, None


def _pulled(grad: Tensor, strength: Tensor | float, heads: int, kv_heads: int) -> Tensor:
    """λ du, summed over the heads that share v⁰: plain arithmetic, which a compiler joins to the sum over layers."""
    by_head: Tensor = grad.unflatten(-1, (heads, -1)) * strength
    if kv_heads < heads:
        by_head = by_head.unflatten(-2, (kv_heads, -1)).sum(-2)
    return by_head.flatten(-2)


packed_attention.register_autograd(_backward, setup_context=_setup_context)
