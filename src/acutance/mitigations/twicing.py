"""Twicing (Transformer Meets Twicing, 2503.00687)."""

from torch import Tensor

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.mitigations.base import Mitigation, register


@register("twicing")
class Twicing(Mitigation):
    """u ← u + A (v − u), which is (2A − A²) v (https://arxiv.org/abs/2503.00687).

    What attention has smoothed away is smoothed once more and added. Not the identity at the start, and it learns
    nothing. A² is never formed: one more product per layer.

    Args:
        from_layer: the first layer that it changes. The authors' vision models have it in all, their language models
            from layer 15 of 16.
    """

    requires = ("square", "plain_attention")

    def __init__(self, from_layer: int = 1) -> None:
        super().__init__()
        self.from_layer = from_layer
        self.check_options()
        if from_layer < 1:
            raise AcutanceError(f"twicing: from_layer counts from 1, it cannot be {from_layer}")

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        return u if call.layer < self.from_layer else u + call.again(call.rows(w, u) - u)
