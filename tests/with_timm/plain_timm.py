"""Mitigations written from their formulas into timm's own forward, by hooks before and after the attention's product.

NeuTRENO: u ← u + λ̃ (v⁰ − v). AttnScale: u ← (1 + ω) u − ω mean(v). FeatScale: y ← y + s mean(y) + t (y − mean(y)).
This file uses no code of the package: v is projected again from the attention's input tokens.
"""

import torch
from torch.nn import functional as F

from parity.parity_formula import rescale


def write_formulas(attentions, own, strength):
    """Make the model with these attention modules compute the mitigations; `own` has each module's parameters."""
    first = []

    def prepare(attention, own):
        # The first module that the heads' outputs enter.
        entrance = getattr(attention, "norm", None)
        entrance = attention.proj if entrance is None else entrance
        values = []

        def enter(_module, args, kwargs):
            values.append(_values(attention, args[0] if args else kwargs["x"]))
            if attention is attentions[0]:
                first[:] = [values[-1]]

        def change(_module, args):
            v, u = values.pop(), args[0].unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            if strength:
                u = u + strength * (first[0] - v)
            if "gain" in own:
                gain = own["gain"][:, None, None]
                u = (1 + gain) * u - gain * v.mean(-2, keepdim=True)
            return u.transpose(1, 2).flatten(2)

        if strength or "gain" in own:
            attention.register_forward_pre_hook(enter, with_kwargs=True)
            entrance.register_forward_pre_hook(change)
        attention.proj.register_forward_hook(lambda _module, _args, y: rescale(y, own) if "low" in own else y)

    for each in zip(attentions, own, strict=True):
        prepare(*each)


def _values(attention, x):
    """v (batch, heads, tokens, head_dim), with each key head repeated for every query head that uses it."""
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
