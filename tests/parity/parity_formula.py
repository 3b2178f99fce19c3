"""The mitigations written from their formulas, with v⁰ passed on explicitly, by no code of the package."""

import re
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from parity.parity_remedies import FORMULAS as MORE

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
    """The learnt parameters of an attention's mitigation, by their paths in it."""
    start = f"{attention}.mitigation."
    return {path.removeprefix(start): p for path, p in state.items() if path.startswith(start)}


def of_part(own, parts, index):
    """Those of one part, by name; of the parity table's mitigations no two share a name."""
    if parts is PARTS or len(parts) == 1:
        return {path.rpartition(".")[2]: p for path, p in own.items()}
    start = f"parts.{index}."
    return {path.removeprefix(start): p for path, p in own.items() if path.startswith(start)}


def hooks(stage, at):
    """The formulas of a stage for the parts of one layer, in order: name, options, learnt parameters, formula."""
    for index, part in enumerate(at.parts):
        name, _, options = part.partition(":")
        formula = FORMULAS.get((name, stage))
        if formula is not None:
            given = dict(option.split("=") for option in options.split(",") if "=" in option)
            yield partial(formula, at, of_part(at.own, at.parts, index), given | {"": options.partition(",")[0]})


def attend(q, k, v, first, own, *, parts=PARTS, mask=None, cut=False, strength=0.0, scale=None, softcap=None, **more):
    """One layer's attention and all about it, with dense matrices; k, v and first may have fewer heads.

    The first layer has no `first`. `own` has learnt parameters, `more` x and what the layer before had.
    """
    k, v, first = (x if x is None else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, first))
    at = SimpleNamespace(q=q, k=k, w=v, v=v, first=first, own=own, parts=parts, cut=cut, strength=strength, **more)

    def logits_of(q, k):
        logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return logits if mask is None else logits + mask

    at.logits_of, at.seen = logits_of, torch.ones_like(q @ k.transpose(-1, -2))
    at.seen = at.seen if mask is None else at.seen * (mask > HIDDEN)
    for change in hooks("values", at):
        at.w = change()
    for change in hooks("queries", at):
        at.q = change()
    at.logits = logits_of(at.q, at.k)
    for change in hooks("logits", at):
        at.logits = change()
    at.A = at.logits.softmax(-1).to(v.dtype)
    at.u = at.A @ at.w
    for change in hooks("output", at):
        at.u = change()
    return at


def column(x, like):
    """Numbers for all heads, or one for each (key) head, against (heads, tokens, head_dim)."""
    return (
        x.repeat_interleave(like.shape[1] // len(x)).to(like.dtype)[:, None, None] if len(x) > 1 else x.to(like.dtype)
    )


def uniform(at):
    """C, the mean over the tokens that each token sees."""
    return (at.seen / at.seen.sum(-1, keepdim=True).clamp_min(1)).to(at.w.dtype)


def attnscale(at, own, _given):
    """u ← (1 + ω) u − ω U v, with U the mean over visible tokens."""
    if "gain" not in own:
        return at.u
    gain = column(own["gain"], at.u)
    return (1 + gain) * at.u - gain * (uniform(at) @ at.w)


def neutreno(at, own, given):
    """u ← u + λ̃ (v⁰ − v)."""
    if at.first is None or not ("learnt_strength" in own or at.strength):
        return at.u
    pull = column(own["learnt_strength"], at.u) if "learnt_strength" in own else at.strength
    return at.u + pull * ((at.first.detach() if at.cut or "detach" in given else at.first) - at.w)


def value_residual(at, own, given):
    """λ₁ v + λ₂ v⁰."""
    if at.first is None:
        return at.w
    if "own" in own:
        return column(own["own"], at.w) * at.w + column(own["first"], at.w) * at.first
    return at.first if "shared" in given else at.w / 2 + at.first / 2


def xsa(at, own, _given):
    """u without its share along v̂."""
    unit = at.w / at.w.norm(dim=-1, keepdim=True)
    alpha = torch.tanh(column(own["gain"], at.u)) if "gain" in own else 1.0
    return at.u - alpha * torch.einsum("bhnd,bhnd,bhne->bhne", at.u, unit, unit)


def gate(at, own, _given):
    """2σ(W_g x), for each head or each channel."""
    gates = 2 / (1 + torch.exp(-torch.einsum("bnc,gc->bng", at.x, own["weight"])))
    return at.u * gates.reshape(*gates.shape[:2], at.u.shape[1], -1).transpose(1, 2)


def shaped(at, own, _given):
    """α + β A − γ C."""
    one, two, three = (column(own[name], at.u) for name in ("own", "attended", "mean"))
    return one * at.w + two * at.u - three * (uniform(at) @ at.w)


def sink(at, own, given):
    """One more column of the softmax, which is dropped."""
    start = torch.full((at.u.shape[1],), float(given[""] or 0)).to(at.u)
    more = own.get("logits", start)[None, :, None, None].expand(*at.logits.shape[:3], 1)
    return at.u * torch.cat([at.logits, more.to(at.logits)], -1).softmax(-1)[..., :-1].sum(-1, keepdim=True)


def talking_heads(at, own, _given):
    """Heads of A mixed by 1 + the learnt matrix; what was added to u before stays."""
    return at.u + torch.einsum("hg,bgij,bhjd->bhid", own["mixing"].to(at.A), at.A, at.w)


def featscale(at, own, given):
    return rescale(at.y, own, 2 if "doubled" in given else 1) if "low" in own else at.y


def rescale(y, own, times=1):
    """FeatScale: the branch's mean over tokens and the rest of the branch are rescaled per channel."""
    mean = y.mean(-2, keepdim=True)
    return y + times * (own["low"].to(y.dtype) * mean + own["high"].to(y.dtype) * (y - mean))


def mv_split(at, _own, given):
    """β (f − f̄) + α (f̄ − x̄)."""
    means, beta, alpha = uniform(at)[:, 0], float(given[""] or 0.03), float(given.get("alpha", 0))
    return beta * (at.y - means @ at.y) + alpha * (means @ at.y - means @ at.residual)


FORMULAS = MORE | {
    ("value_residual", "values"): value_residual,
    ("attnscale", "output"): attnscale, ("neutreno", "output"): neutreno, ("xsa", "output"): xsa,
    ("gate", "output"): gate, ("shaped", "output"): shaped, ("sink", "output"): sink,
    ("talking_heads", "output"): talking_heads,
    ("featscale", "features"): featscale, ("mv_split", "features"): mv_split,
}  # fmt: skip


def rotate(x, rope):
    """Rotate channels (2i, 2i + 1) by their token's angle, not the class token; `rope` has sines and cosines."""
    sines, cosines = rope.chunk(2, -1)
    even, odd = x[:, :, 1:, ::2], x[:, :, 1:, 1::2]
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return torch.cat([x[:, :, :1], (x[:, :, 1:] * cosines + turned * sines).to(x.dtype)], 2)


class Plain:
    """A model with explicit formulas for attention, run with a mitigated model's parameters by name.

    `layers` has its attentions and their W_proj in order. `parts(layer)` are a layer's mitigations in order. `mask` is
    added to all logits. `cut` leaves out the gradient through v⁰ at one layer.
    """

    def __init__(self, model, layers, *, heads=None, parts=lambda layer: PARTS, mask=None, strength=0.0, cut=None):
        names = {module: name for name, module in model.named_modules()}
        self.model, self.heads, self.parts, self.mask = model, heads, parts, mask
        self.strength, self.cut, self.first, self.state, self.at = strength, cut, None, {}, None
        self.layers = {attention: (layer, names[attention]) for layer, (attention, _) in enumerate(layers, 1)}
        if is_of_transformers := hasattr(model, "set_attn_implementation"):
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import eager_mask

            AttentionInterface.register("plain_formula", self.of_transformers)
            AttentionMaskInterface.register("plain_formula", eager_mask)
            model.set_attn_implementation("plain_formula")
        self.x = {}  # what entered an attention
        for attention, projection in layers:
            projection.register_forward_hook(lambda _module, _args, y: self.features(y))
            block = model.get_submodule(re.match(r"(.*?(^|\.)\d+)\.", names[attention])[1])
            block.register_forward_pre_hook(self.enter, with_kwargs=True)
            block.register_forward_hook(lambda _module, _args, output: self.stream(output))
            attention.register_forward_pre_hook(self.enter_attention, with_kwargs=True)
            if not is_of_transformers:
                attention.forward = partial(self.forward, attention, projection)

    def __call__(self, state, *args, **options):
        self.state = state
        own = {name: state[name] for name, _ in self.model.named_parameters()}
        return torch.func.functional_call(self.model, own, args, options)

    def enter_attention(self, attention, args, options):
        """Before an attention: its tokens."""
        self.x[attention] = args[0] if args else options["hidden_states"]

    def enter(self, _block, args, options):
        """Before a block: what enters it."""
        self.residual = args[0] if args else options["hidden_states"]

    def attend(self, attention, q, k, v, **options):
        if attention not in self.layers:  # cross-attention
            return attend(q, k, v, None, {}, **options).u
        layer, path = self.layers[attention]
        self.first = v if layer == 1 else self.first
        options |= {"parts": self.parts(layer), "strength": self.strength, "cut": layer == self.cut}
        turned = self.residual.shape[0] != len(q)  # tokens first
        options |= {"residual": self.residual.transpose(0, 1) if turned else self.residual}
        options |= {"before": None if layer == 1 else self.at, "layer": layer}
        self.at = attend(q, k, v, None if layer == 1 else self.first, learnt(self.state, path), **options)
        return self.at.u

    def features(self, y):
        """What comes out of W_proj, changed."""
        self.at.y = y
        for change in hooks("features", self.at):
            self.at.y = change()
        return self.at.y

    def stream(self, output):
        """What comes out of a block, changed."""
        x = output if isinstance(output, torch.Tensor) else output[0]
        turned = self.at.u.shape[0] != x.shape[0]
        self.at.out = x.transpose(0, 1) if turned else x
        for change in hooks("stream", self.at):
            self.at.out = change()
        x = self.at.out.transpose(0, 1) if turned else self.at.out
        return x if isinstance(output, torch.Tensor) else (x, *output[1:])

    def of_transformers(self, module, query, key, value, attention_mask, **known):
        masks = [term for term in (attention_mask, known.get("position_bias")) if term is not None]
        options = {"mask": sum(masks) if masks else None, "scale": known.get("scaling")}
        u = self.attend(module, query, key, value, softcap=known.get("softcap"), x=self.x.get(module), **options)
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
        u = self.attend(module, q, k, v, mask=sum(masks) if masks else None, x=x)
        y = projection(u.transpose(1, 2).flatten(2))
        y = y.transpose(0, 1) if turned else y
        return (y, None) if is_torchs else y
