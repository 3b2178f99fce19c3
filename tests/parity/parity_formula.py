"""The mitigations of the matrix written from their formulas, in plain PyTorch, with v⁰ passed on explicitly.

Nothing here is the package's. `cut` leaves out the gradient through v⁰ at one layer: the smallest of the mistakes that
the matrix must be able to see. Other tests take their formulas from here too.
"""

import re
from typing import NamedTuple

import torch
from torch.nn import functional as F

HIDDEN = -1e30  # what a mask adds to the logits of what is not seen is lower


class Names(NamedTuple):
    """What a library calls the parts of a block."""

    blocks: str  # with the dot behind it
    attention: str
    joint: str  # the projection to q, k and v
    output: str
    up: str
    down: str


def learnt(state, attention):
    """What the mitigation in an attention learns, by name."""
    return {path.rpartition(".")[2]: p for path, p in state.items() if path.startswith(f"{attention}.mitigation.")}


def cayley(theta):
    """V = (I + S)⁻¹ (I − S), S = (Θ − Θᵀ)/2."""
    skew, identity = (theta - theta.T) / 2, torch.eye(len(theta)).to(theta)
    return torch.linalg.solve(identity + skew, identity - skew)


def with_plain_weights(state, value, output, basis=cayley):
    """Eigen: W_V = Vᵀ and W_proj = V Λ under their usual names, Λ = −ψ²."""
    plain = dict(state)
    for attention in {match[1] for path in state if (match := re.fullmatch(r"(.*)\.mitigation\..*\btheta", path))}:
        own = learnt(state, attention)
        v = basis(own["theta"])
        module, _, leaf = f"{attention}.{value}".rpartition(".")
        others = plain.pop(f"{module}.parametrizations.{leaf}.original0", v[:0])  # the rows of q and k
        plain[f"{module}.{leaf}"] = torch.cat([others, v.T])
        plain[f"{attention}.{output}"] = v * -own["psi"].square()
    return plain


def attend(q, k, v, first, own, *, mask=None, cut=False, strength=0.0, scale=None, softcap=None):
    """u per head, (batch, heads, tokens, head_dim); k, v and first may have fewer heads; `own` is what is learnt.

    AttnScale: u ← (1 + ω) u − ω U v, U the mean over what a token sees. NeuTRENO: u ← u + λ̃ (v⁰ − v).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    u = (scores if mask is None else scores + mask).softmax(-1).to(v.dtype) @ v
    if "gain" in own:
        gain, seen = own["gain"].to(u.dtype)[:, None, None], torch.ones_like(scores)
        seen = seen if mask is None else seen * (mask > HIDDEN)
        u = (1 + gain) * u - gain * ((seen / seen.sum(-1, keepdim=True)).to(v.dtype) @ v)
    if first is not None and ("learnt_strength" in own or strength):  # learnt in all layers but the first
        first = first.repeat_interleave(q.shape[1] // first.shape[1], dim=1)
        pull = own["learnt_strength"].to(u.dtype)[:, None, None] if "learnt_strength" in own else strength
        u = u + pull * ((first.detach() if cut else first) - v)
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


def encode(
    state, x, *, heads, depth, names, eps=1e-5, cut=None, norm_first=True, activation=F.gelu, memory=None, **attending
):
    """Blocks on a state dict, in plain sight, and the norm after them if it is called `norm`."""
    first = None

    def norm(x, part, name):
        return F.layer_norm(x, x.shape[-1:], part[f"{name}.weight"], part.get(f"{name}.bias"), eps)

    for layer in range(1, depth + 1):
        prefix = f"{names.blocks}{layer - 1}."
        block = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        own, values = learnt(block, names.attention), []

        def linear(x, name, block=block):
            return F.linear(x, block[f"{name}weight"], block.get(f"{name}bias"))

        def attention(x, name, source, linear=linear, values=values, **options):
            joint = [linear(each, f"{name}.{names.joint}").chunk(3, -1) for each in (x, source)]
            parts = joint[0][0], *joint[1][1:]
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            values.append(v)
            u = attend(q, k, v, **options)
            return linear(u.transpose(1, 2).flatten(2), f"{name}.{names.output}.")

        def self_attention(x, block=block, own=own, layer=layer, first=first):
            y = attention(x, names.attention, x, first=first, own=own, cut=layer == cut, **attending)
            return rescale(y, own) * block.get("gain", 1.0)

        branches = [self_attention]
        if memory is not None:
            branches.append(lambda x: attention(x, "multihead_attn", memory, first=None, own={}))
        branches.append(lambda x: linear(activation(linear(x, f"{names.up}.")), f"{names.down}."))
        for number, branch in enumerate(branches, 1):
            name = f"norm{number}"
            x = x + branch(norm(x, block, name)) if norm_first else norm(x + branch(x), block, name)
        first = values[0] if first is None else first
    return norm(x, state, "norm") if "norm.weight" in state else x


def embed_patches(state, images, patch):
    """Patches, the class token before them, and positions."""
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    x = x.flatten(2).transpose(1, 2)
    return torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]


def use_formula(model, layers, own, *, strength=0.0, cut=None):
    """Let a model of transformers attend so; `layers` are its attentions and their W_proj, `own` what each learns."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    first = {}

    def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, position_bias=None, **_):
        layer = next((n for n, (known, _) in enumerate(layers) if known is module), None)
        masks = [term for term in (attention_mask, position_bias) if term is not None]
        options = {"mask": sum(masks) if masks else None, "scale": scaling, "softcap": softcap}
        if layer is None:  # cross-attention
            return attend(query, key, value, None, {}, **options).transpose(1, 2).contiguous(), None
        first["v"] = value if layer == 0 else first["v"]
        options |= {"strength": strength, "cut": cut == layer + 1}
        return attend(query, key, value, first["v"], own[layer], **options).transpose(1, 2).contiguous(), None

    AttentionInterface.register("plain_formula", attention)
    AttentionMaskInterface.register("plain_formula", eager_mask)
    model.set_attn_implementation("plain_formula")
    for (_, projection), learnt_here in zip(layers, own, strict=True):
        projection.register_forward_hook(lambda _module, _args, y, own=learnt_here: rescale(y, own))
