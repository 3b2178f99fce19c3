"""Exclusive self-attention (2603.09078)."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.mitigations.base import LayerShape, Mitigation, register

LEAST = 1e-12  # of ‖v‖², in float32: a token without a value loses nothing


@register("xsa")
class XSA(Mitigation):
    """u ← u − α (u·v/‖v‖²) v: attention without what a token says of itself (https://arxiv.org/abs/2603.09078).

    Args:
        gated: α = tanh(a) with a learnt per head from 0; otherwise α is 1.
    """

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.check_options()

    def build(self, shape: LayerShape) -> None:
        if self.gated:
            self.gain = nn.Parameter(torch.zeros(shape.heads))

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        own = call.rows(w, u)
        wide = torch.promote_types(u.dtype, torch.float32)
        share = (u.to(wide) * own).sum(-1, keepdim=True) / own.to(wide).square().sum(-1, keepdim=True).clamp_min(LEAST)
        share = share * self.gain.to(wide).tanh()[:, None, None] if self.gated else share
        return u - share.to(u.dtype) * own
