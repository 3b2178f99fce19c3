"""FeatScale (Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis, 2203.05962)."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("featscale")
class FeatScale(Mitigation):
    """y ← y + s ⊙ mean(y) + t ⊙ (y − mean(y)), per channel, s and t learnt from 0 (https://arxiv.org/abs/2203.05962).

    The mean runs over all tokens, class token included: where some are padding, or the future, it is refused.

    Args:
        doubled: add the correction twice (gains 1 + 2s and 1 + 2t), as the authors' public DeiT code does;
            the paper and their CaiT and Swin code add it once.
    """

    requires = ("all_visible", "all_tokens")

    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        self.doubled = doubled
        self.check_options()

    def build(self, shape: LayerShape) -> None:
        self.low, self.high = (nn.Parameter(torch.zeros(shape.dim)) for _ in range(2))

    def features(self, y: Tensor, call: AttentionCall) -> Tensor:
        mean = y.mean(dim=-2, keepdim=True)
        correction = self.low.to(y.dtype) * mean + self.high.to(y.dtype) * (y - mean)
        return y + 2 * correction if self.doubled else y + correction
