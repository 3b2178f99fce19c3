"""Attention with its mitigation, straight from the packed projection.

u = c·A w + (1 − c)·U w + λ (v⁰ − w), A = softmax(q kᵀ·s), w = v + ρ (v⁰ − v), is one kernel forward and one or two
backward. Above 256 tokens, a contrast needs sums of w and du, which are made first. The kernels read q, k and v as the
joint projection leaves them, and write u as the output projection takes it; the gradients likewise. No transpose, no
copy and no pass for the correction remains. Where the kernels are not available, the operator gives the same result.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from acutance.attention.kernels.packed_operation import (
    MOST_TOKENS,
    packed_attention,
    shared_values,
    unregistered_attention,
)
from acutance.attention.kernels.tracing import constant_in_traces, is_watched
from acutance.errors import ShapeError

# The head widths that the kernels take, by the bytes of a number. In float32 wider ones do not fit into the registers
# and compile for minutes. For long sequences 128 is left to SDPA, whose cuDNN back-end is faster there.
WIDTHS = {2: (16, 32, 64, 128), 4: (16, 32)}
LONG_WIDTHS: dict[int, tuple[int, ...]] = {2: (16, 32, 64)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_TRITON = (3, 6)  # the compiler of 3.2 crashes on one of the kernels; versions in between were not tried
CAPABILITY = (9, 0)  # Hopper, where the kernels were tried and timed
ANY_GPU = os.environ.get("ACUTANCE_KERNELS") == "1"  # uses the kernels on NVIDIA's other GPUs too
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs on the CPU, slowly, for tests


def _has_triton() -> bool:
    """Whether there is a Triton that the kernels were run with, for NVIDIA's GPUs."""
    for package in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            found = tuple(int(number) for number in re.findall(r"\d+", version(package))[:2])
            return found >= OLDEST_TRITON and torch.version.hip is None
    return False


# Asked once, outside any traced code.
TRITON = _has_triton()


@constant_in_traces
def _is_known(gpu: int | None) -> bool:
    """Whether the kernels may run on this GPU."""
    return ANY_GPU or torch.cuda.get_device_capability(gpu) == CAPABILITY


def runs_on(x: Tensor) -> bool:
    """Whether Triton's kernels may run on this tensor's device."""
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
        qkv: q, k and v side by side, each head by head, (batch, tokens, (heads + 2 · kv_heads) · width).
        heads: how many heads of queries.
        scale: of the dot product.
        first: v⁰ as (batch, tokens, kv_heads · width); None leaves the correction and the mixing out.
        strength: λ, a constant or one per head.
        causal: whether a token sees only itself and earlier ones.
        contrast: c, one per head; None is 1.
        residual: ρ, a constant or one per head of keys.
        kv_heads: how many heads of keys and values. Successive heads of queries share one. `heads` by default.
    """
    return _attend(qkv, heads, scale, first, strength, causal, contrast, residual, kv_heads)[0]


def first_attention(
    qkv: Tensor,
    heads: int,
    scale: float,
    causal: bool = False,
    contrast: Tensor | None = None,
    kv_heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` of the first layer, and its values (batch, tokens, kv_heads · width), the v⁰ of later layers."""
    u, stand_in = _attend(qkv, heads, scale, None, 0.0, causal, contrast, 0.0, kv_heads)
    return u, shared_values(qkv, stand_in)


def _attend(
    qkv: Tensor,
    heads: int,
    scale: float,
    first: Tensor | None,
    strength: Tensor | float,
    causal: bool,
    contrast: Tensor | None,
    residual: Tensor | float,
    kv_heads: int | None,
) -> tuple[Tensor, Tensor]:
    """u, and what stands in for the values."""
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads or qkv.shape[-1] % (heads + 2 * kv_heads):
        raise ShapeError(
            f"qkv {tuple(qkv.shape)} does not hold {heads} heads of queries and {kv_heads} of keys and of values: the "
            "last dimension is (heads + 2 · kv_heads) · width, and heads a multiple of kv_heads"
        )
    constant = 0.0 if isinstance(strength, Tensor) else strength
    by_head = strength.expand(heads).contiguous() if isinstance(strength, Tensor) and first is not None else None
    share = None if first is None else _shares(residual, kv_heads, qkv)
    if first is not None and first.stride(-1) != 1:
        first = first.contiguous()
    contrast = None if contrast is None else contrast.expand(heads).contiguous()
    numbers = (constant, heads, kv_heads, scale, causal)
    attend = packed_attention if torch.is_grad_enabled() or is_watched(qkv) else unregistered_attention
    u, _log_sums, stand_in = attend(qkv, first, by_head, contrast, share, *numbers)
    return u, stand_in


def _shares(residual: Tensor | float, kv_heads: int, qkv: Tensor) -> Tensor | None:
    """ρ per head; None where there is nothing to mix."""
    if isinstance(residual, Tensor):
        return residual.expand(kv_heads).contiguous()
    return None if residual == 0 else torch.full((kv_heads,), residual, dtype=torch.float32, device=qkv.device)
