"""Shaped and centred attention (2306.01610, 2311.01906)."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("shaped")
class Shaped(Mitigation):
    """u = α v + β A v − γ C v, C uniform over what a token sees, learnt per head (https://arxiv.org/abs/2306.01610).

    In a new model all three start at 1: attention that is nearly uniform cancels, and the identity is left. (The paper
    starts W_Q at 0, which makes that exact.) In a trained model they start at 0, 1 and 0, which is what the model does.
    """

    changes_attention = True

    def build(self, shape: LayerShape) -> None:
        starts = (0.0, 1.0, 0.0) if shape.pretrained else (1.0, 1.0, 1.0)
        self.own, self.attended, self.mean = (nn.Parameter(torch.full((shape.heads,), start)) for start in starts)

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        own, attended, mean = (x.to(u.dtype)[:, None, None] for x in (self.own, self.attended, self.mean))
        centre = call.visible_mean(w)
        return own * call.rows(w, u) + attended * u - mean * centre
