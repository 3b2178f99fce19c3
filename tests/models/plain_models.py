"""The reference models written a second time, from the formulas, on float64 tensors, by no code of the package."""

import math

import torch
from torch.nn import functional as F

from attention.operator_cases import formula


def plain_vit(state, images, *, heads=3, **options):
    tokens = _patches(state, images)
    if "cls_token" in state:
        tokens = torch.cat([torch.cat([state["cls_token"]] * len(images)), tokens], 1)
    x = _norm(_blocks(state, tokens + state["pos_embed"], heads, **options), state, "norm", 1e-6)
    return _linear(x[:, 0] if "cls_token" in state else x.mean(1), state, "head")


def plain_segmenter(state, images, *, grid=(3, 3), heads=3, decoder_heads=2, **options):
    encoder, decoder = _part(state, "encoder."), _part(state, "decoder.")
    side = encoder["patch_embed.proj.weight"].shape[-1]
    height, width = images.shape[2:]
    rows, columns = math.ceil(height / side), math.ceil(width / side)
    padded = images.new_zeros(*images.shape[:2], rows * side, columns * side)
    padded[..., :height, :width] = images
    positions = bilinear(encoder["pos_embed"][0, 1:].T.reshape(-1, *grid), (rows, columns)).flatten(1).T
    front = torch.cat([encoder["cls_token"] + encoder["pos_embed"][:, :1]] * len(images))
    x = torch.cat([front, _patches(encoder, padded) + positions], 1)
    x = _norm(_blocks(encoder, x, heads, eps=1e-5, **options), encoder, "norm", 1e-5)
    classes = decoder["cls_emb"].shape[1]
    x = torch.cat([_linear(x[:, 1:], decoder, "proj_dec"), torch.cat([decoder["cls_emb"]] * len(images))], dim=1)
    x = _norm(_blocks(decoder, x, decoder_heads, eps=1e-5, **options), decoder, "decoder_norm", 1e-5)
    seen, wanted = x[:, :-classes] @ decoder["proj_patch"], x[:, -classes:] @ decoder["proj_classes"]
    lengths = torch.sqrt((seen**2).sum(-1)[:, :, None] * (wanted**2).sum(-1)[:, None, :])
    masks = _norm((seen @ wanted.transpose(1, 2)) / lengths, decoder, "mask_norm", 1e-5)
    maps = [bilinear(mask.T.reshape(classes, rows, columns), (rows * side, columns * side)) for mask in masks]
    return torch.stack(maps)[..., :height, :width]


def plain_language(state, tokens, *, heads=3, cutoffs=(5, 9, 16), **options):
    """log p of every word after every token."""
    length, dim = tokens.shape[1], state["embed.weight"].shape[1]
    angles = [[back / 10_000 ** (2 * i / dim) for i in range(dim // 2)] for back in reversed(range(length))]
    positions = [[math.sin(a) for a in row] + [math.cos(a) for a in row] for row in angles]
    x = state["embed.weight"][tokens] * math.sqrt(dim) + torch.tensor(positions, dtype=torch.float64)
    x = _blocks(state, x, heads, eps=1e-5, post=True, relu=True, causal=True, **options)
    scores = torch.exp(x @ state["embed.weight"].T + state["softmax.bias"])
    if not cutoffs:
        return torch.log(scores / scores.sum(-1, keepdim=True))
    clusters = torch.exp(x @ state["softmax.cluster_weight"].T + state["softmax.cluster_bias"])
    total = scores[..., : cutoffs[0]].sum(-1) + clusters.sum(-1)
    parts, ends = [scores[..., : cutoffs[0]] / total[..., None]], [*cutoffs, scores.shape[-1]]
    for i in range(len(cutoffs)):  # a cluster's probability is divided among its words by their scores
        inside = scores[..., ends[i] : ends[i + 1]]
        parts.append(inside * (clusters[..., i] / total / inside.sum(-1))[..., None])
    return torch.log(torch.cat(parts, -1))


def bilinear(image, size):
    """Resize (channels, height, width). The centres of corner pixels keep their distance to the border."""
    for axis, wanted in ((1, size[0]), (2, size[1])):
        old, rows = image.shape[axis], []
        for i in range(wanted):
            place = max((i + 0.5) * old / wanted - 0.5, 0)
            low = min(int(place), old - 1)
            high, share = min(low + 1, old - 1), place - low
            rows.append((1 - share) * image.select(axis, low) + share * image.select(axis, high))
        image = torch.stack(rows, dim=axis)
    return image


def _part(state, prefix):
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _linear(x, state, name):
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)


def _norm(x, state, name, eps):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def _patches(state, images):
    weight, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
    return F.conv2d(images, weight, bias, stride=weight.shape[-1]).flatten(2).mT


def _blocks(state, x, heads, *, eps=1e-6, post=False, relu=False, detach=False, **options):
    first = None
    for layer in range(1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))):
        block = _part(state, f"blocks.{layer}.")
        normed = x if post else _norm(x, block, "norm1", eps)
        y, values = _attention(block, normed, first, heads, **options)
        first = (values.detach() if detach else values) if first is None else first
        x = x + y * block.get("ls1.gamma", 1.0)
        x = _norm(x, block, "norm1", eps) if post else x
        hidden = _linear(x if post else _norm(x, block, "norm2", eps), block, "mlp.fc1")
        hidden = hidden.clamp(min=0) if relu else hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + _linear(hidden, block, "mlp.fc2") * block.get("ls2.gamma", 1.0)
        x = _norm(x, block, "norm2", eps) if post else x
    return x


def _attention(block, x, first, heads, kernel="softmax", strength=0.0, causal=False):
    symmetric = kernel == "symmetric"
    parts = _linear(x, block, "attn.kv" if symmetric else "attn.qkv").chunk(2 if symmetric else 3, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (parts[0], parts[-2], parts[-1]))
    u = formula(q, k, causal=causal, kernel=kernel)[0] @ v
    if first is not None:
        learnt = block.get("attn.mitigation.learnt_strength")
        u = u + (strength if learnt is None else learnt[:, None, None]) * (first - v)
    return _linear(u.transpose(1, 2).flatten(2), block, "attn.proj"), v
