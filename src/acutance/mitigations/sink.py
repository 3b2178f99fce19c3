"""A sink of attention that is no token: learnt, or softmax off by one."""

from typing import Literal

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("sink")
class Sink(Mitigation):
    """A_ij = exp(l_ij) / (exp(s) + Σ_k exp(l_ik)): one more logit s, which has no value (https://arxiv.org/abs/2309.17453).

    Rows of A then sum to less than one. s = 0 is softmax off by one. Not the identity at the start; a very low s is
    near it. The sums cost one more pass over the keys.

    Args:
        start: s, or where it starts.
        learn: "head" learns one s per head, as in gpt-oss; None keeps it.
    """

    positional = "start"
    requires = ("plain_attention",)
    changes_attention = True

    def __init__(self, start: float = 0.0, learn: Literal["head"] | None = "head") -> None:
        super().__init__()
        self.start, self.learn = start, learn
        self.check_options()

    def build(self, shape: LayerShape) -> None:
        logits = torch.full((shape.heads,), self.start)
        if self.learn is None:
            self.register_buffer("logits", logits, persistent=False)
        else:
            self.logits = nn.Parameter(logits)

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        call.operator = call.A.replace(sink=self.logits)
        return u * call.operator.row_scale.to(u.dtype)
