"""Talking heads (2003.02436), after the softmax."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("talking_heads")
class TalkingHeads(Mitigation):
    """u_h = Σ_g T_hg A_g v_h: heads mixed after the softmax, T learnt from the identity (https://arxiv.org/abs/2003.02436).

    No N×N matrix: each A_g is applied to the values of all heads, which costs as many products as there are key heads.
    """

    changes_attention = True

    def build(self, shape: LayerShape) -> None:
        self.mixing = nn.Parameter(torch.zeros(shape.heads, shape.heads))  # T − 1

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        heads, kv_heads = u.shape[1], w.shape[1]
        every = w.transpose(1, 2).flatten(2).unsqueeze(1).expand(-1, kv_heads, -1, -1)
        by_each = call.own(every).unflatten(-1, (kv_heads, -1))  # A_g v_k: (batch, g, tokens, k, head_dim)
        mixing = self.mixing.to(u.dtype).unflatten(0, (kv_heads, heads // kv_heads))
        call.operator, call.refusal = None, "its heads are mixed after the softmax, so there is no operator per head"
        return u + torch.einsum("krg,bgnkd->bkrnd", mixing, by_each).flatten(1, 2)
