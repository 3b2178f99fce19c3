"""The language model written a second time, from the formulas, on a plain dictionary of float64 tensors.

It shares no code with the package: every attention matrix is formed, head by head, and every word's probability.
"""

import math

import torch


def plain_log_probabilities(state, tokens, *, heads, cutoffs, strength=0.0):
    """log p of every word after every token; NeuTRENO's λ̃ is a number, or the state's learnt one."""
    dim = state["embed.weight"].shape[1]
    x = state["embed.weight"][tokens] * math.sqrt(dim) + _positions(tokens.shape[1], dim)
    first = None
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    for layer in range(depth):
        prefix = f"blocks.{layer}."
        block = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        y, values = _attention(block, x, first, heads, strength)
        first = values if first is None else first
        x = _norm(x + y, block, "norm1")
        hidden = (x @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"]).clamp(min=0)
        x = _norm(x + hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"], block, "norm2")
    scores = torch.exp(x @ state["embed.weight"].T + state["softmax.bias"])
    return torch.log(_probabilities(x, scores, state, cutoffs))


def _probabilities(x, scores, state, cutoffs):
    """Words of a cluster share out the cluster's probability by their scores."""
    if not cutoffs:
        return scores / scores.sum(-1, keepdim=True)
    clusters = torch.exp(x @ state["softmax.cluster_weight"].T + state["softmax.cluster_bias"])
    total = scores[..., : cutoffs[0]].sum(-1) + clusters.sum(-1)
    parts = [scores[..., : cutoffs[0]] / total[..., None]]
    ends = [*cutoffs, scores.shape[-1]]
    for i in range(len(cutoffs)):
        inside = scores[..., ends[i] : ends[i + 1]]
        share = clusters[..., i] / total / inside.sum(-1)
        parts.append(inside * share[..., None])
    return torch.cat(parts, -1)


def _positions(length, dim):
    rows = []
    for place in range(length):
        back = length - 1 - place
        angles = [back / 10_000 ** (2 * i / dim) for i in range(dim // 2)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return torch.tensor(rows, dtype=torch.float64)


def _norm(x, state, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]


def _attention(block, x, first, heads, strength):
    width = x.shape[-1] // heads
    q, k, v = (x @ block["attn.qkv.weight"].T).chunk(3, dim=-1)
    outputs = []
    learnt = block.get("attn.mitigation.learnt_strength")
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)
        weights = torch.exp(scores).tril()
        u = weights / weights.sum(-1, keepdim=True) @ v[..., part]
        if first is not None:
            lam = strength if learnt is None else learnt[head if len(learnt) > 1 else 0]
            u = u + lam * (first[..., part] - v[..., part])
        outputs.append(u)
    return torch.cat(outputs, -1) @ block["attn.proj.weight"].T, v
