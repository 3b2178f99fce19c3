"""The mitigations written from their formulas, with v⁰ passed on explicitly, by no code of the package."""

import re
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN = -1e30  # a mask adds less than this to the logits of hidden keys
PARTS = ("attnscale", "neutreno", "featscale")


def basis_of(basis, theta):
    """Eigen's V."""
    identity = torch.eye(theta.shape[-1]).to(theta)
    if basis == "qr":
        lower = torch.linalg.cholesky(theta.mT @ theta)  # ΘᵀΘ = RᵀR, and V = ΘR⁻¹
        return torch.linalg.solve_triangular(lower, theta.mT, upper=False).mT
    if basis == "polar":
        u, _, vh = torch.linalg.svd(theta)
        return u @ vh
    if basis == "cayley":  # V = (I + S)⁻¹ (I − S), S = (Θ − Θᵀ)/2
        skew = (theta - theta.mT) / 2
        return torch.linalg.solve(identity + skew, identity - skew)
    if basis == "householder":
        v = identity
        for j in range(len(theta)):
            reflector = torch.cat([theta.new_zeros(j), theta.new_ones(1), theta[j + 1 :, j]])
            v = v @ (identity - 2 * torch.outer(reflector, reflector) / reflector.dot(reflector))
        return v
    return theta


def spectrum_of(sign, spectrum, psi):
    """Eigen's Λ."""
    if spectrum == "clipped":
        return psi.clamp(0.0 if sign == "positive" else -1.0, 0.0 if sign == "negative" else 1.0)
    if sign == "free":
        return torch.tanh(psi) if spectrum == "bounded" else psi
    size = 1 / (1 + (-psi).exp()) if spectrum == "bounded" else psi * psi
    return size if sign == "positive" else -size


def with_plain_weights(
    state, value, output, basis="cayley", *, sign="negative", spectrum="square", rows=None, across=False
):
    """Eigen: W_V = Vᵀ and W_proj = V⁻ᵀ Λ under their usual names, which are given relative to a block.

    `rows` are the rows of W_V in a joint matrix if they are not the last ones. `across`: it is stored transposed.
    """
    plain = dict(state)
    for path in [path for path in state if path.endswith(".theta")]:
        v, psi = basis_of(basis, state[path]), state[f"{path.removesuffix('theta')}psi"]
        block = re.match(r".*?\.\d+\.", path)[0]
        module, _, leaf = f"{block}{value}".rpartition(".")
        others = plain.pop(f"{module}.parametrizations.{leaf}.original0", v[:0])  # the rows of q and k
        joint = torch.cat([others.mT if across else others, v.mT])
        if rows is not None:
            joint = joint[torch.tensor(sorted(set(range(len(joint))) - set(rows)) + list(rows)).argsort()]
        made = (torch.linalg.inv(v).mT if basis == "inverse" else v) * spectrum_of(sign, spectrum, psi)
        plain[f"{module}.{leaf}"], plain[f"{block}{output}"] = (w.mT if across else w for w in (joint, made))
    return plain


def learnt(state, attention):
    """The learnt parameters of an attention's mitigation, by name."""
    return {path.rpartition(".")[2]: p for path, p in state.items() if path.startswith(f"{attention}.mitigation.")}


def attend(q, k, v, first, own, *, parts=PARTS, mask=None, cut=False, strength=0.0, scale=None, softcap=None):
    """u per head, (batch, heads, tokens, head_dim). k, v and first may have fewer heads; `own` has learnt parameters.

    AttnScale: u ← (1 + ω) u − ω U v, with U the mean over visible tokens. NeuTRENO: u ← u + λ̃ (v⁰ − v).
    """
    k, v, first = (x if x is None else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, first))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    u = (scores if mask is None else scores + mask).softmax(-1).to(v.dtype) @ v
    for part in parts:
        if part.startswith("attnscale") and "gain" in own:
            gain, seen = own["gain"].to(u.dtype)[:, None, None], torch.ones_like(scores)
            seen = seen if mask is None else seen * (mask > HIDDEN)
            u = (1 + gain) * u - gain * ((seen / seen.sum(-1, keepdim=True).clamp_min(1)).to(v.dtype) @ v)
        if part.startswith("neutreno") and first is not None and ("learnt_strength" in own or strength):
            pull = own["learnt_strength"].to(u.dtype)[:, None, None] if "learnt_strength" in own else strength
            u = u + pull * ((first.detach() if cut or "detach" in part else first) - v)
    return u


def rotate(x, rope):
    """Rotate channels (2i, 2i + 1) by their token's angle, not the class token; `rope` has sines and cosines."""
    sines, cosines = rope.chunk(2, -1)
    even, odd = x[:, :, 1:, ::2], x[:, :, 1:, 1::2]
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return torch.cat([x[:, :, :1], (x[:, :, 1:] * cosines + turned * sines).to(x.dtype)], 2)


def rescale(y, own, parts=PARTS):
    """FeatScale: the branch's mean over tokens and the rest of the branch are rescaled per channel."""
    for part in parts if "low" in own else ():
        if part.startswith("featscale"):
            mean, times = y.mean(-2, keepdim=True), 2 if "doubled" in part else 1
            y = y + times * (own["low"].to(y.dtype) * mean + own["high"].to(y.dtype) * (y - mean))
    return y


class Plain:
    """A model with explicit formulas for attention, run with a mitigated model's parameters by name.

    `layers` has its attentions and their W_proj in order. `parts(layer)` are a layer's mitigations in order. `mask` is
    added to all logits. `cut` leaves out the gradient through v⁰ at one layer.
    """

    def __init__(self, model, layers, *, heads=None, parts=lambda layer: PARTS, mask=None, strength=0.0, cut=None):
        names = {module: name for name, module in model.named_modules()}
        self.model, self.heads, self.parts, self.mask = model, heads, parts, mask
        self.strength, self.cut, self.first, self.state = strength, cut, None, {}
        self.layers = {attention: (layer, names[attention]) for layer, (attention, _) in enumerate(layers, 1)}
        if is_of_transformers := hasattr(model, "set_attn_implementation"):
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import eager_mask

            AttentionInterface.register("plain_formula", self.of_transformers)
            AttentionMaskInterface.register("plain_formula", eager_mask)
            model.set_attn_implementation("plain_formula")
        for attention, projection in layers:
            projection.register_forward_hook(lambda _module, _args, y, at=attention: rescale(y, *self.of(at)[1:]))
            if not is_of_transformers:
                attention.forward = partial(self.forward, attention, projection)

    def __call__(self, state, *args, **options):
        self.state = state
        own = {name: state[name] for name, _ in self.model.named_parameters()}
        return torch.func.functional_call(self.model, own, args, options)

    def of(self, attention):
        """A layer's number, its learnt parameters, and the names of its mitigations."""
        layer, path = self.layers[attention]
        return layer, learnt(self.state, path), self.parts(layer)

    def attend(self, attention, q, k, v, **options):
        if attention not in self.layers:  # cross-attention
            return attend(q, k, v, None, {}, **options)
        layer, own, parts = self.of(attention)
        self.first = v if layer == 1 else self.first
        options |= {"parts": parts, "strength": self.strength, "cut": layer == self.cut}
        return attend(q, k, v, None if layer == 1 else self.first, own, **options)

    def of_transformers(self, module, query, key, value, attention_mask, **known):
        masks = [term for term in (attention_mask, known.get("position_bias")) if term is not None]
        options = {"mask": sum(masks) if masks else None, "scale": known.get("scaling")}
        u = self.attend(module, query, key, value, softcap=known.get("softcap"), **options)
        return u.transpose(1, 2).contiguous(), None

    def forward(self, module, projection, x, *_, rope=None, attn_mask=None, key_padding_mask=None, **_options):
        """The forward of nn.MultiheadAttention, which has float masks, and of hand-written attention."""
        is_torchs = isinstance(module, nn.MultiheadAttention)
        turned = is_torchs and not module.batch_first and x.ndim == 3
        x = x.transpose(0, 1) if turned else x if x.ndim == 3 else x[None]
        if is_torchs:
            q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        elif hasattr(module, "q_proj"):
            q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
        else:
            q, k, v = module.c_attn(x).chunk(3, -1)
        width = q.shape[-1] // self.heads
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in (q, k, v))
        q, k = (q, k) if rope is None else (rotate(q, rope), rotate(k, rope))
        keys = None if key_padding_mask is None else key_padding_mask[:, None, None]
        pairs = attn_mask.unflatten(0, (-1, self.heads)) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        masks = [mask for mask in (self.mask, keys, pairs) if mask is not None]
        u = self.attend(module, q, k, v, mask=sum(masks) if masks else None)
        y = projection(u.transpose(1, 2).flatten(2))
        y = y.transpose(0, 1) if turned else y
        return (y, None) if is_torchs else y
