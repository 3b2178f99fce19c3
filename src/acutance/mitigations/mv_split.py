"""MV-Split (2605.06169)."""

from torch import Tensor

from acutance.attention import AttentionCall
from acutance.mitigations.base import Mitigation, register


@register("mv_split")
class MVSplit(Mitigation):
    """x + β (f − f̄) + α (f̄ − x̄) in place of x + f, f the attention branch (https://arxiv.org/abs/2605.06169).

    Bars are means over the tokens that a token sees: over all of them, or over those before it where attention is
    causal. Not the identity at the start.

    Args:
        beta: what the branch's deviation from its mean counts.
        alpha: how far the mean of the stream is replaced by the branch's.
    """

    positional = "beta"
    requires = ("residual", "all_tokens", "square")

    def __init__(self, beta: float = 0.03, alpha: float = 0.0) -> None:
        super().__init__()
        self.beta, self.alpha = beta, alpha
        self.check_options()

    def features(self, y: Tensor, call: AttentionCall) -> Tensor:
        mean = call.seen_mean(y)
        split = self.beta * (y - mean)
        return split if self.alpha == 0 else split + self.alpha * (mean - call.seen_mean(call.residual))  # type: ignore[arg-type]
