"""Gated attention (2505.06708)."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.attention import AttentionCall
from acutance.errors import ShapeError
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("gate")
class Gate(Mitigation):
    """u ← u ⊙ 2σ(W_g x), W_g learnt from 0, x what enters the attention (https://arxiv.org/abs/2505.06708).

    The paper's gate is σ, which is ½ where W_g is 0. Twice that is the identity, and W_proj takes up the factor.

    Args:
        by: one gate per "head", or one per "channel" of each head.
    """

    positional = "by"

    def __init__(self, by: Literal["head", "channel"] = "head") -> None:
        super().__init__()
        self.by = by
        self.check_options()

    def build(self, shape: LayerShape) -> None:
        count = shape.heads * (1 if self.by == "head" else shape.head_dim)
        self.weight = nn.Parameter(torch.zeros(count, shape.dim))

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        tokens = None if call.x is None else call.x.flatten(1, -2)  # a grid of tokens too
        if tokens is None or (tokens.shape[0], tokens.shape[1]) != (u.shape[0], u.shape[2]):
            given = None if call.x is None else tuple(call.x.shape)
            raise ShapeError(
                f"{call.name}: a gate needs x of the rows of u {tuple(u.shape)}; the attention got {given}"
            )
        gates = 2 * F.linear(tokens, self.weight.to(tokens.dtype)).sigmoid()
        by_head: Tensor = gates.unflatten(-1, (u.shape[1], -1)).transpose(1, 2)
        return u * by_head.to(u.dtype)
