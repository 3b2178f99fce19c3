"""The mitigations of the matrix written from their formulas, in plain PyTorch, with v⁰ passed on explicitly.

Nothing here is the package's. `cut` leaves out the gradient through v⁰ at one layer: the smallest of the mistakes that
the matrix must be able to see.
"""

import re
from typing import NamedTuple

import torch
from torch.nn import functional as F


class Names(NamedTuple):
    """What a library calls the parts of a Pre-LN block."""

    blocks: str
    attention: str
    joint: str  # the projection to q, k and v
    output: str
    up: str
    down: str


def learnt(state, attention):
    """What the mitigation in an attention learns, by name."""
    return {path.rpartition(".")[2]: p for path, p in state.items() if path.startswith(f"{attention}.mitigation.")}


def with_plain_weights(state, value, output):
    """Eigen: W_V = Vᵀ and W_proj = V Λ under their usual names, V = (I + S)⁻¹ (I − S), S = (Θ − Θᵀ)/2, Λ = −ψ²."""
    plain = dict(state)
    for attention in {match[1] for path in state if (match := re.fullmatch(r"(.*)\.mitigation\..*\btheta", path))}:
        own = learnt(state, attention)
        skew, identity = (own["theta"] - own["theta"].T) / 2, torch.eye(len(own["theta"])).to(own["theta"])
        v = torch.linalg.solve(identity + skew, identity - skew)
        module, _, leaf = f"{attention}.{value}".rpartition(".")
        others = plain.pop(f"{module}.parametrizations.{leaf}.original0", v[:0])  # the rows of q and k
        plain[f"{module}.{leaf}"] = torch.cat([others, v.T])
        plain[f"{attention}.{output}"] = v * -own["psi"].square()
    return plain


def attend(q, k, v, first, own, *, mask=None, cut=False):
    """u per head, (batch, heads, tokens, head_dim); k, v and first may have fewer heads; `own` is what is learnt.

    AttnScale: u ← (1 + ω) u − ω U v, U the mean over what a token sees. NeuTRENO: u ← u + λ̃ (v⁰ − v).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    u = (scores if mask is None else scores + mask).softmax(-1).to(v.dtype) @ v
    if "gain" in own:
        gain, seen = own["gain"].to(u.dtype)[:, None, None], torch.ones_like(scores)
        seen = seen if mask is None else seen * (mask == 0)
        u = (1 + gain) * u - gain * ((seen / seen.sum(-1, keepdim=True)).to(v.dtype) @ v)
    if "learnt_strength" in own:  # not in the first layer
        first = first.repeat_interleave(q.shape[1] // first.shape[1], dim=1)
        u = u + own["learnt_strength"].to(u.dtype)[:, None, None] * ((first.detach() if cut else first) - v)
    return u


def rotate(x, rope):
    """Channels (2i, 2i + 1) turned by their token's angle, of which rope has sines and cosines; not the class token."""
    sines, cosines = rope.chunk(2, -1)
    even, odd = x[:, :, 1:, ::2], x[:, :, 1:, 1::2]
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return torch.cat([x[:, :, :1], (x[:, :, 1:] * cosines + turned * sines).to(x.dtype)], 2)


def rescale(y, own):
    """FeatScale: the branch's mean over tokens and what is left of it are rescaled per channel."""
    if "low" not in own:
        return y
    mean = y.mean(-2, keepdim=True)
    return y + own["low"].to(y.dtype) * mean + own["high"].to(y.dtype) * (y - mean)


def encode(state, x, *, heads, depth, names, eps, cut):
    """Pre-LN blocks on a state dict, in plain sight."""
    first = None
    for layer in range(1, depth + 1):
        prefix = f"{names.blocks}.{layer - 1}."
        block = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        def linear(x, name, block=block):
            return F.linear(x, block[f"{name}weight"], block[f"{name}bias"])

        def norm(x, name, block=block):
            return F.layer_norm(x, x.shape[-1:], block[f"{name}.weight"], block[f"{name}.bias"], eps)

        own = learnt(block, names.attention)
        joint = linear(norm(x, "norm1"), f"{names.attention}.{names.joint}")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in joint.chunk(3, -1))
        u = attend(q, k, v, first, own, cut=layer == cut)
        x = x + rescale(linear(u.transpose(1, 2).flatten(2), f"{names.attention}.{names.output}."), own)
        x = x + linear(F.gelu(linear(norm(x, "norm2"), f"{names.up}.")), f"{names.down}.")
        first = v if first is None else first
    return x


def embed_patches(state, images, patch):
    """Patches, the class token before them, and positions."""
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    x = x.flatten(2).transpose(1, 2)
    return torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]
