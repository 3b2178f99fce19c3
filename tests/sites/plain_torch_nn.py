"""torch.nn's Transformer layers written a second time, from the formulas, on a plain dictionary of float64 tensors.

It shares no code with the package or torch.nn: every attention matrix is formed, sample by sample and head by head.
Tokens are (batch, tokens, dim); `bias` is what is added to the logits, (batch, heads, tokens, tokens), −∞ where hidden.
"""

import math

import torch


def plain_layers(state, x, *, heads, bias, norm_first=False, memory=None, strength=0.0):
    """The layers called `layers.0`, `layers.1`, … of the state dict, and the norm after them if there is one."""
    first = None
    for layer in range(1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))):
        part = {n.removeprefix(f"layers.{layer}."): t for n, t in state.items() if n.startswith(f"layers.{layer}.")}
        x, values = plain_layer(part, x, heads, bias, norm_first, memory, first, strength)
        first = values if first is None else first
    return _norm(x, state, "norm") if "norm.weight" in state else x


def plain_layer(part, x, heads, bias, norm_first, memory, first, strength):
    def self_attention(tokens):
        return _attention(part, "self_attn", tokens, tokens, heads, bias, first, strength)

    def branch(name, function):
        nonlocal x
        x = x + function(_norm(x, part, name)) if norm_first else _norm(x + function(x), part, name)

    values = None

    def keep_values(tokens):
        nonlocal values
        y, values = self_attention(tokens)
        return y * part.get("gain", 1.0)

    branch("norm1", keep_values)
    if memory is not None:
        branch("norm2", lambda t: _attention(part, "multihead_attn", t, memory, heads, None, None, 0.0)[0])
    branch("norm2" if memory is None else "norm3", lambda t: _feedforward(part, t))
    return x, values


def _attention(part, name, tokens, source, heads, bias, first, strength):
    dim = tokens.shape[-1]
    width = dim // heads
    weight = part[f"{name}.in_proj_weight"]
    shift = part.get(f"{name}.in_proj_bias", torch.zeros(3 * dim, dtype=weight.dtype))
    q = tokens @ weight[:dim].T + shift[:dim]
    k = source @ weight[dim : 2 * dim].T + shift[dim : 2 * dim]
    v = source @ weight[2 * dim :].T + shift[2 * dim :]
    mitigated = {n.rpartition(".")[2]: t for n, t in part.items() if n.startswith(f"{name}.mitigation.")}
    samples = []
    for sample in range(len(tokens)):
        outputs = []
        for head in range(heads):
            here = slice(head * width, (head + 1) * width)
            logits = q[sample, :, here] @ k[sample, :, here].T / math.sqrt(width)
            seen = torch.ones_like(logits) if bias is None else (bias[sample, head] > -math.inf).to(logits.dtype)
            if bias is not None:
                logits = logits + bias[sample, head]
            weights = torch.exp(logits - logits.detach().max())
            u = weights / weights.sum(1, keepdim=True) @ v[sample, :, here]
            if "gain" in mitigated:
                uniform = seen / seen.sum(1, keepdim=True)
                u = u + mitigated["gain"][head] * (u - uniform @ v[sample, :, here])
            if first is not None:
                learnt = mitigated.get("learnt_strength")
                pull = strength if learnt is None else learnt[head]
                u = u + pull * (first[sample, :, here] - v[sample, :, here])
            outputs.append(u)
        samples.append(torch.cat(outputs, -1))
    y = torch.stack(samples) @ part[f"{name}.out_proj.weight"].T + part.get(f"{name}.out_proj.bias", 0.0)
    if "low" in mitigated:
        mean = y.mean(1, keepdim=True)
        y = y + mitigated["low"] * mean + mitigated["high"] * (y - mean)
    return y, v


def _feedforward(part, x):
    hidden = x @ part["linear1.weight"].T + part.get("linear1.bias", 0.0)
    return torch.where(hidden > 0, hidden, 0.0) @ part["linear2.weight"].T + part.get("linear2.bias", 0.0)


def _norm(x, state, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
    return scaled * state[f"{name}.weight"] + state.get(f"{name}.bias", 0.0)
