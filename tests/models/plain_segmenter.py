"""Segmenter written a second time, from the formulas, on a plain dictionary of float64 tensors.

It shares no code with the package: patches are cut by hand, every attention matrix is formed, head by head, and
bilinear interpolation is written out as a sum over the four neighbours.
"""

import math

import torch


def plain_segmenter(state, images, *, patch, grid, heads, decoder_heads, symmetric=False, strength=0.0):
    """Class scores at every pixel; NeuTRENO's λ̃ is a number, or the state's learnt one."""
    encoder, decoder = _part(state, "encoder."), _part(state, "decoder.")
    height, width = images.shape[2:]
    rows, columns = math.ceil(height / patch), math.ceil(width / patch)
    padded = images.new_zeros(*images.shape[:2], rows * patch, columns * patch)
    padded[..., :height, :width] = images
    positions = bilinear(encoder["pos_embed"][0, 1:].T.reshape(-1, *grid), (rows, columns)).flatten(1).T
    weight, bias = encoder["patch_embed.proj.weight"], encoder["patch_embed.proj.bias"]
    tokens = []
    for image in padded:
        cut = [
            (weight * image[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]).sum((1, 2, 3)) + bias
            for r in range(rows)
            for c in range(columns)
        ]
        front = encoder["cls_token"][0, 0] + encoder["pos_embed"][0, 0]
        tokens.append(torch.stack([front, *(torch.stack(cut) + positions)]))
    x = _blocks(encoder, torch.stack(tokens), heads, symmetric, strength)
    patches = _norm(x, encoder, "norm")[:, 1:] @ decoder["proj_dec.weight"].T + decoder["proj_dec.bias"]
    classes = decoder["cls_emb"].shape[1]
    x = torch.cat([patches, torch.cat([decoder["cls_emb"]] * len(images))], dim=1)
    x = _norm(_blocks(decoder, x, decoder_heads, symmetric, strength), decoder, "decoder_norm")
    seen, wanted = x[:, :-classes] @ decoder["proj_patch"], x[:, -classes:] @ decoder["proj_classes"]
    lengths = torch.sqrt((seen**2).sum(-1)[:, :, None] * (wanted**2).sum(-1)[:, None, :])
    masks = _norm((seen @ wanted.transpose(1, 2)) / lengths, decoder, "mask_norm")
    maps = [bilinear(mask.T.reshape(classes, rows, columns), (rows * patch, columns * patch)) for mask in masks]
    return torch.stack(maps)[..., :height, :width]


def bilinear(image, size):
    """(channels, height, width) resized; the centres of the corner pixels keep their distance to the border."""
    out = image
    for axis, wanted in ((1, size[0]), (2, size[1])):
        old = out.shape[axis]
        rows = []
        for i in range(wanted):
            place = max((i + 0.5) * old / wanted - 0.5, 0)
            low = min(int(place), old - 1)
            high, share = min(low + 1, old - 1), place - low
            rows.append((1 - share) * out.select(axis, low) + share * out.select(axis, high))
        out = torch.stack(rows, dim=axis)
    return out


def _part(state, prefix):
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _blocks(state, x, heads, symmetric, strength):
    first = None
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    for layer in range(depth):
        block = _part(state, f"blocks.{layer}.")
        y, values = _attention(block, _norm(x, block, "norm1"), first, heads, symmetric, strength)
        first = values if first is None else first
        x = x + y
        hidden = _norm(x, block, "norm2") @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"]
    return x


def _norm(x, state, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]


def _attention(block, x, first, heads, symmetric, strength):
    width = x.shape[-1] // heads
    name = "attn.kv" if symmetric else "attn.qkv"
    parts = (x @ block[f"{name}.weight"].T + block[f"{name}.bias"]).chunk(2 if symmetric else 3, dim=-1)
    q, k, v = parts[0], parts[-2], parts[-1]
    learnt = block.get("attn.mitigation.learnt_strength")
    outputs = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        weights = torch.exp(q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width))
        u = weights / weights.sum(-1, keepdim=True) @ v[..., part]
        if first is not None:
            lam = strength if learnt is None else learnt[head if len(learnt) > 1 else 0]
            u = u + lam * (first[..., part] - v[..., part])
        outputs.append(u)
    return torch.cat(outputs, -1) @ block["attn.proj.weight"].T + block["attn.proj.bias"], v
