"""GFSA (Graph Convolutions Enrich the Self-Attention in Transformers!, 2312.04234)."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("gfsa")
class GFSA(Mitigation):
    """u ← u + w (u + (K − 1)(A u − u)), w learnt per head from 0 (https://arxiv.org/abs/2312.04234).

    This is the filter A + w (A + (K − 1)(A² − A)), whose last factor stands for Aᴷ. A² is never formed: one more
    product per layer. The paper's third term, w₀ I, is left out, as in the authors' image models.

    Args:
        order: K, 4 in the authors' image models.
    """

    positional = "order"
    requires = ("square", "plain_attention")

    def __init__(self, order: int = 4) -> None:
        super().__init__()
        self.order = order
        self.check_options()
        if order < 2:
            raise AcutanceError(f"gfsa: order is K, at least 2, not {order}")

    def build(self, shape: LayerShape) -> None:
        self.weight = nn.Parameter(torch.zeros(shape.heads))

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        high = u + (self.order - 1) * (call.again(u) - u)
        return u + self.weight.to(u.dtype)[:, None, None] * high
