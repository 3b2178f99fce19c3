"""Elliptical (Elliptical Attention, 2406.13770)."""

import torch
from torch import Tensor

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations.base import Mitigation, Scores, register


@register("elliptical")
class Elliptical(Mitigation):
    """softmax(s q diag(m) kᵀ), m from the values of this layer and the one before (https://arxiv.org/abs/2406.13770).

    m is the mean of |v − v of the layer before| over tokens, per head and channel, divided by its largest channel, and
    without a gradient. The paper's δ cancels in that quotient. The mean runs over the tokens that each query sees, so
    it ignores padding and is causal where attention is; the authors' language code averages over the future too.
    Not the identity at the start, and it learns nothing. The first layer has none before it, so it stays as it is.
    With rotary positions m weighs rotated channels, so attention then depends on absolute positions too.
    """

    requires = ("previous_values", "first_values")  # the same tokens in all layers

    def scores(self, q: Tensor | None, k: Tensor | None, call: AttentionCall) -> Scores:
        call.keep(call.v)
        if call.layer == 1:
            return q, k, None
        if q is None:
            raise AcutanceError(f"{call.name}: elliptical scales queries, which this written softmax does not show")
        before = call.previous
        if before.shape != call.v.shape or q.shape[-1] != call.v.shape[-1]:
            sizes = f"q {tuple(q.shape)}, v {tuple(call.v.shape)}, v of the layer before {tuple(before.shape)}"
            raise ShapeError(f"{call.name}: elliptical needs values as wide as queries, alike in all layers: {sizes}")
        with torch.no_grad():
            moved = call.visible_mean((call.v - before).abs())
            metric = moved / moved.amax(-1, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
        return q * metric.to(q.dtype), k, None
