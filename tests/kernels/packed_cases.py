"""The formula of the packed kernel written plainly, and inputs for it."""

import torch


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


def inputs(batch, tokens, heads, width, dtype=torch.float32, device="cpu", size=1.0, kv_heads=None):
    """q, k and v, v⁰ as another layer's projection holds it, λ and c per head and ρ per key head, and a gradient."""
    g = torch.Generator().manual_seed(0)
    kv_heads = heads if kv_heads is None else kv_heads
    packed = (heads + 2 * kv_heads) * width
    qkv = size * torch.randn(batch, tokens, packed, generator=g)
    first = torch.randn(batch, tokens, packed, generator=g)[..., -kv_heads * width :]
    strength = torch.rand(heads, generator=g)
    grad = torch.randn(batch, tokens, heads * width, generator=g)
    contrast, residual = 1 + torch.randn(heads, generator=g), torch.rand(kv_heads, generator=g)
    tensors = (qkv.to(device, dtype), first.to(device, dtype), strength.to(device))
    return *tensors, contrast.to(device), residual.to(device), grad.to(device, dtype)


def expected(leaves, grad, heads, kv_heads, scale, causal=False):
    """Output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    out = plain(*leaves, heads, kv_heads, scale, causal)
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())


def error(ours, theirs):
    """Relative; of one token alone the contrast's gradient is 0, and must be so exactly."""
    found = (ours.double() - theirs).norm()
    return (found / theirs.norm()).item() if theirs.norm() > 0 else found.item()
