"""Mitigations written from their formulas into timm's own forward, by hooks around what stands beside the product.

NeuTRENO: u ← u + λ̃ (v⁰ − v). AttnScale: u ← (1 + ω) u − ω mean(v). FeatScale: y ← y + s mean(y) + t (y − mean(y)).
Nothing here is the package's: v is projected anew from the tokens that enter the attention.
"""

from contextlib import ExitStack, contextmanager

import torch
from torch.nn import functional as F


@contextmanager
def plain_formulas(attentions, strength, gains, lows, highs):
    """Inside, a model whose attention modules are these computes the three mitigations; Nones leave one out."""
    first = []

    def prepare(layer):
        attention = attentions[layer]
        # The last module that the heads' outputs go through before any norm or gate.
        entrance = getattr(attention, "norm", None)
        entrance = attention.proj if entrance is None else entrance
        values = []

        def enter(_module, args, kwargs):
            values.append(_values(attention, args[0] if args else kwargs["x"]))
            if layer == 0:
                first[:] = [values[-1]]

        def change(_module, args):
            v, u = values.pop(), args[0].unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            if strength is not None:
                u = u + strength * (first[0] - v)
            if gains is not None:
                gain = gains[layer][:, None, None]
                u = (1 + gain) * u - gain * v.mean(-2, keepdim=True)
            return u.transpose(1, 2).flatten(2)

        def rescale(_module, _args, y):
            mean = y.mean(1, keepdim=True)
            return y + lows[layer] * mean + highs[layer] * (y - mean)

        if strength is not None or gains is not None:
            yield attention.register_forward_pre_hook(enter, with_kwargs=True)
            yield entrance.register_forward_pre_hook(change)
        if lows is not None:
            yield attention.proj.register_forward_hook(rescale)

    with ExitStack() as stack:
        for layer in range(len(attentions)):
            for hook in prepare(layer):
                stack.callback(hook.remove)
        yield


def _values(attention, x):
    """(batch, heads, tokens, head_dim), each key head once for every query head that uses it."""
    if getattr(attention, "v_proj", None) is not None:
        v = F.linear(x, attention.v_proj.weight, attention.v_proj.bias)
    else:
        width = len(attention.qkv.weight) // 3
        bias = attention.qkv.bias
        bias = getattr(attention, "v_bias", None) if bias is None else bias[2 * width :]
        v = F.linear(x, attention.qkv.weight[2 * width :], bias)
    key_heads = getattr(attention, "num_kv_heads", attention.num_heads)
    v = v.unflatten(-1, (key_heads, -1)).transpose(1, 2)
    return torch.repeat_interleave(v, attention.num_heads // key_heads, dim=1)
