"""Where the kernels' tests run, the formula of the packed kernel written plainly, and inputs for it."""

import pytest
import torch

from acutance.attention.kernels import packed as kernels

CUDA = torch.cuda.is_available() and kernels.TRITON and kernels._is_known(None)
RUNS = CUDA or (kernels.INTERPRETED and kernels.TRITON)
DEVICE = "cuda" if CUDA else "cpu"
needs_kernels = pytest.mark.skipif(not RUNS, reason="needs a GPU or Triton's interpreter")
# Half precision rounds A, u and the gradients once each; float32 is computed in float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE) if CUDA else [torch.float32, torch.float16]  # NumPy, the interpreter's base, has no bfloat16


def plain(qkv, first, strength, contrast, residual, heads, kv_heads, scale, causal=False):
    """c·A w + (1 − c)·U w + λ (v⁰ − w) with w = (1 − ρ) v + ρ v⁰, A and U as matrices, heads merged."""
    batch, tokens, packed = qkv.shape
    group, width = heads // kv_heads, packed // (heads + 2 * kv_heads)
    q, k, v = (
        part.reshape(batch, tokens, -1, width).transpose(1, 2)
        for part in qkv.split([heads * width, kv_heads * width, kv_heads * width], -1)
    )
    first = first.reshape(batch, tokens, -1, width).transpose(1, 2)
    w = (1 - residual[:, None, None]) * v + residual[:, None, None] * first
    k, w, first = (x.repeat_interleave(group, 1) for x in (k, w, first))
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=qkv.device)
    if causal:
        visible = visible.tril()
    A = (q @ k.mT * scale).masked_fill(~visible, float("-inf")).softmax(-1)
    U = visible / visible.sum(-1, keepdim=True, dtype=qkv.dtype)
    c = contrast[:, None, None]
    u = (c * A + (1 - c) * U) @ w + strength[:, None, None] * (first - w)
    return u.transpose(1, 2).flatten(2)


def inputs(batch, tokens, heads, width, dtype=torch.float32, size=1.0, kv_heads=None):
    """q, k and v, v⁰ as another layer's projection holds it, λ and c per head and ρ per key head, and a gradient."""
    g = torch.Generator().manual_seed(0)
    kv_heads = heads if kv_heads is None else kv_heads
    packed = (heads + 2 * kv_heads) * width
    qkv = size * torch.randn(batch, tokens, packed, generator=g)
    first = torch.randn(batch, tokens, packed, generator=g)[..., -kv_heads * width :]
    strength = torch.rand(heads, generator=g)
    grad = torch.randn(batch, tokens, heads * width, generator=g)
    contrast, residual = 1 + torch.randn(heads, generator=g), torch.rand(kv_heads, generator=g)
    numbers = (strength.to(DEVICE), contrast.to(DEVICE), residual.to(DEVICE))
    return qkv.to(DEVICE, dtype), first.to(DEVICE, dtype), *numbers, grad.to(DEVICE, dtype)


def expected(leaves, grad, heads, kv_heads, scale, causal=False):
    """Output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    out = plain(*leaves, heads, kv_heads, scale, causal)
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())


def error(ours, theirs):
    """Relative; of one token alone the contrast's gradient is 0, and must be so exactly."""
    found = (ours.double() - theirs).norm()
    return (found / theirs.norm()).item() if theirs.norm() > 0 else found.item()
