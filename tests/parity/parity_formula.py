"""The mitigation of the matrix written from its formulas, in plain PyTorch, with v⁰ passed on explicitly.

Nothing here is the package's. NeuTRENO with λ̃ learnt per head: u ← u + λ̃ (v⁰ − v). FeatScale: the branch's mean over
tokens and what is left of it are rescaled per channel. `cut` leaves out the gradient through v⁰ at one layer: the
smallest of the mistakes that the matrix must be able to see.
"""

import re
from typing import NamedTuple

import torch
from torch.nn import functional as F

STRENGTH, LOW, HIGH = "learnt_strength", "low", "high"


class Names(NamedTuple):
    """What a library calls the parts of a Pre-LN block."""

    blocks: str
    attention: str
    joint: str  # the projection to q, k and v
    output: str
    up: str
    down: str


def learnt(state, attention, name):
    """A learnt parameter of the mitigation in an attention; None where there is none."""
    return next((p for path, p in state.items() if re.fullmatch(rf"{attention}\.mitigation\..*\b{name}", path)), None)


def attend(q, k, v, first, strength, *, mask=None, cut=False):
    """u per head, (batch, heads, tokens, head_dim); k and v may have fewer heads, first and strength may be None."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    u = (scores if mask is None else scores + mask).softmax(-1).to(v.dtype) @ v
    if strength is None:
        return u
    first = first.repeat_interleave(q.shape[1] // first.shape[1], dim=1)
    return u + strength.to(u.dtype)[:, None, None] * ((first.detach() if cut else first) - v)


def rotate(x, rope):
    """Channels (2i, 2i + 1) turned by their token's angle, of which rope has sines and cosines; not the class token."""
    sines, cosines = rope.chunk(2, -1)
    even, odd = x[:, :, 1:, ::2], x[:, :, 1:, 1::2]
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return torch.cat([x[:, :, :1], (x[:, :, 1:] * cosines + turned * sines).to(x.dtype)], 2)


def rescale(y, low, high):
    """What FeatScale makes of the branch's output, (batch, tokens, dim); low and high may be None."""
    if low is None:
        return y
    mean = y.mean(-2, keepdim=True)
    return y + low.to(y.dtype) * mean + high.to(y.dtype) * (y - mean)


def encode(state, x, *, heads, depth, names, activation, eps, cut):
    """Pre-LN blocks on a state dict, in plain sight."""
    first = None
    for layer in range(1, depth + 1):
        block = {
            name.removeprefix(f"{names.blocks}.{layer - 1}."): value
            for name, value in state.items()
            if name.startswith(f"{names.blocks}.{layer - 1}.")
        }

        def linear(x, name, block=block):
            return F.linear(x, block[f"{name}weight"], block[f"{name}bias"])

        def norm(x, name, block=block):
            return F.layer_norm(x, x.shape[-1:], block[f"{name}.weight"], block[f"{name}.bias"], eps)

        attention = names.attention
        joint = linear(norm(x, "norm1"), f"{attention}.{names.joint}")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in joint.chunk(3, -1))
        u = attend(q, k, v, first, learnt(block, attention, STRENGTH), cut=layer == cut)
        y = linear(u.transpose(1, 2).flatten(2), f"{attention}.{names.output}.")
        x = x + rescale(y, learnt(block, attention, LOW), learnt(block, attention, HIGH))
        x = x + linear(activation(linear(norm(x, "norm2"), f"{names.up}.")), f"{names.down}.")
        first = v if first is None else first
    return x


def embed_patches(state, images, patch):
    """Patches, the class token before them, and positions."""
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    x = x.flatten(2).transpose(1, 2)
    return torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]
