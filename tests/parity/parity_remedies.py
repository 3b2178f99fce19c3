"""Formulas of remedies with dense matrices, by no code of the package: more rows for `parity_formula.FORMULAS`.

Each takes what is known of a layer, its learnt parameters, and its options as text.

Once, by hand, all seven were compared with their authors' public code in float64: one layer of three heads on 17 random
tokens, the same weights on both sides. Twicing's outputs agreed to 15 digits (8.9e-15 off, the largest being 17.7), and
so did GFSA's (1.1e-14 of 25.1), Re-attention's in both modes, LSA's, Elliptical's and both forms of ContraNorm's; RPC's
agreed to 13 digits after four iterations.
"""

import torch


def mean_seen(at, x):
    return at.seen @ x / at.seen.sum(-1, keepdim=True).clamp_min(1)


def twicing(at, _own, given):
    """(2A − A²) v, where u is A v."""
    return at.u if at.layer < int(given.get("from_layer", 1)) else at.u + at.A @ at.w - at.A @ at.u


def gfsa(at, own, given):
    """A + w (A + (K − 1)(A² − A)), where u is A v."""
    order = int(given[""] or 4)
    return at.u + own["weight"][:, None, None] * ((2 - order) * at.u + (order - 1) * (at.A @ at.u))


def lsa_queries(at, own, _given):
    return at.q + own["gain"][:, None, None] * at.q


def lsa_logits(at, _own, given):
    """No token sees itself, if it sees another one."""
    eye = torch.eye(at.logits.shape[-1], dtype=torch.bool)
    lonely = (at.seen * ~eye).sum(-1, keepdim=True) == 0
    return at.logits if "diagonal" in given else at.logits.masked_fill(eye & ~lonely, -torch.inf)


def reattention(at, own, _given, seen=(0.0, 1.0)):
    """Heads of A mixed, then normed by the mean and variance that were seen, or by the batch's own."""
    own = {path.rpartition(".")[2]: p for path, p in own.items()}
    mixed = torch.einsum("gh,bhij->bgij", own["mixing"], at.A)
    moments = (mixed.mean((0, 2, 3)), mixed.var((0, 2, 3), correction=0)) if seen is None else seen
    mean, variance = (torch.ones_like(own["weight"]) * moment for moment in moments)
    normed = (mixed - mean[:, None, None]) / torch.sqrt(variance + 1e-5)[:, None, None]
    return (own["weight"][:, None, None] * normed + own["bias"][:, None, None]) @ at.w


def elliptical(at, _own, _given):
    """q diag(m)."""
    if at.before is None:
        return at.q
    moved = mean_seen(at, (at.v - at.before.v).abs().detach())
    return at.q * moved / moved.amax(-1, keepdim=True).clamp_min(1e-30)


def rpc(at, _own, given):
    """The keys become the queries; in layer 1 after an iteration."""
    k, threshold = at.k, float(given.get("threshold", 4))
    if at.layer > 1 and "all_layers" not in given:
        return k
    low = y = torch.zeros_like(k)
    mu = k.shape[1] * k.shape[-1] / (4 * mean_seen(at, k.abs().sum(-1, keepdim=True))).clamp_min(1e-12)
    for _ in range(int(given.get("iterations", 4))):
        x, border = k - low + y / mu, threshold * mu
        errors = torch.where(x > border, x - border, torch.where(x < -border, x + border, 0))
        at.k = k - errors - y / mu
        low = at.logits_of(at.k, at.k).softmax(-1) @ at.v
        y = y + mu * (k - low - errors)
    return at.k


def contranorm(at, _own, given):
    """(1 + s) x, or x, less s softmax(x̂ x̂ᵀ/τ) x."""
    x, strength = at.out, float(given[""] or 0.05)
    unit = x / x.norm(dim=-1, keepdim=True)
    alike = (unit @ unit.mT / float(given.get("temperature", 1))).masked_fill(at.seen[:, 0] == 0, -torch.inf)
    kept = strength * x if given.get("form") == "identity" else 0
    return x + kept - strength * alike.softmax(-1).nan_to_num() @ x


FORMULAS = {
    ("lsa", "queries"): lsa_queries, ("elliptical", "queries"): elliptical, ("rpc", "queries"): rpc,
    ("lsa", "logits"): lsa_logits, ("twicing", "output"): twicing, ("gfsa", "output"): gfsa,
    ("reattention", "output"): reattention, ("contranorm", "stream"): contranorm,
}  # fmt: skip
