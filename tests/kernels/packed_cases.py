"""The formula of the packed kernel written plainly, and inputs for it."""

import torch


def plain(qkv, first, strength, heads, scale, causal=False):
    """softmax(q kᵀ·s) v + λ (v⁰ − v), heads merged."""
    batch, tokens, packed = qkv.shape
    q, k, v = qkv.reshape(batch, tokens, 3, heads, packed // (3 * heads)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT * scale
    if causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=qkv.device).triu(1)
        logits = logits.masked_fill(later, float("-inf"))
    u = logits.softmax(-1) @ v
    if first is not None:
        u = u + strength[:, None, None] * (first.unflatten(-1, (heads, -1)).transpose(1, 2) - v)
    return u.transpose(1, 2).flatten(2)


def inputs(batch, tokens, heads, width, dtype=torch.float32, device="cpu", size=1.0):
    """q, k and v, v⁰ as another layer's projection holds it, λ per head, and a gradient."""
    g = torch.Generator().manual_seed(0)
    packed = 3 * heads * width
    qkv = size * torch.randn(batch, tokens, packed, generator=g)
    first = torch.randn(batch, tokens, packed, generator=g)[..., 2 * heads * width :]
    strength = torch.rand(heads, generator=g)
    grad = torch.randn(batch, tokens, heads * width, generator=g)
    return qkv.to(device, dtype), first.to(device, dtype), strength.to(device), grad.to(device, dtype)


def expected(qkv, first, strength, grad, heads, scale, causal=False):
    """Output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (qkv, first, strength)]
    out = plain(*leaves, heads, scale, causal)
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())
