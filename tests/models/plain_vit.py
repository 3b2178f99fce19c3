"""A vision Transformer written a second time, from the formulas, on a plain dictionary of float64 tensors.

It shares no code with the package: patches are cut by hand, every attention matrix is formed, head by head.
"""

import math

import torch


def plain_vit(state, images, *, patch, heads, kernel="softmax", strength=0.0):
    """Class scores of a model with this state dict; NeuTRENO's λ̃ is a number, or the state's learnt one."""
    x = _embed(state, images, patch)
    first = None
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    for layer in range(depth):
        block = {
            name.removeprefix(f"blocks.{layer}."): value
            for name, value in state.items()
            if name.startswith(f"blocks.{layer}.")
        }
        y, values = _attention(block, _norm(x, block, "norm1"), first, heads, kernel, strength)
        first = values if first is None else first
        x = x + y * block.get("ls1.gamma", 1.0)
        hidden = _norm(x, block, "norm2") @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + (hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"]) * block.get("ls2.gamma", 1.0)
    x = _norm(x, state, "norm")
    pooled = x[:, 0] if "cls_token" in state else x.mean(1)
    return pooled @ state["head.weight"].T + state["head.bias"]


def _embed(state, images, patch):
    weight, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
    rows = []
    for image in images:
        tokens = [
            (weight * image[:, top : top + patch, left : left + patch]).sum((1, 2, 3)) + bias
            for top in range(0, image.shape[1], patch)
            for left in range(0, image.shape[2], patch)
        ]
        if "cls_token" in state:
            tokens.insert(0, state["cls_token"][0, 0])
        rows.append(torch.stack(tokens))
    return torch.stack(rows) + state["pos_embed"]


def _norm(x, state, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-6) * state[f"{name}.weight"] + state[f"{name}.bias"]


def _attention(block, x, first, heads, kernel, strength):
    dim = x.shape[-1]
    width = dim // heads
    if kernel == "symmetric":
        projected = x @ block["attn.kv.weight"].T + block["attn.kv.bias"]
        q = k = projected[..., :dim]
        v = projected[..., dim:]
    else:
        projected = x @ block["attn.qkv.weight"].T + block["attn.qkv.bias"]
        q, k, v = projected[..., :dim], projected[..., dim : 2 * dim], projected[..., 2 * dim :]
    learnt = block.get("attn.mitigation.learnt_strength")
    outputs = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        weights = _kernel_matrix(kernel, q[..., part], k[..., part])
        weights = weights / weights.sum(-1, keepdim=True)
        u = weights @ v[..., part]
        if first is not None:
            pull = strength if learnt is None else learnt[head % len(learnt)]
            u = u + pull * (first[..., part] - v[..., part])
        outputs.append(u)
    return torch.cat(outputs, -1) @ block["attn.proj.weight"].T + block["attn.proj.bias"], v


def _kernel_matrix(kernel, q, k):
    scale = 1 / math.sqrt(q.shape[-1])
    products = torch.einsum("bid,bjd->bij", q, k)
    if kernel in ("softmax", "symmetric"):
        return torch.exp(scale * products)
    if kernel == "rbf":
        return torch.exp(-scale * ((q[:, :, None] - k[:, None]) ** 2).sum(-1) / 2)
    if kernel == "polynomial":
        return (1 + scale * products) ** 2
    positive = [torch.where(t > 0, t + 1, torch.exp(t)) for t in (q, k)]
    return torch.einsum("bid,bjd->bij", *positive)
