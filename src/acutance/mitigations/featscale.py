"""FeatScale (Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis, 2203.05962)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.kernels.epilogue import Epilogue
from acutance.mitigations.attnscale import visible_keys
from acutance.mitigations.base import LayerShape, Mitigation, register
from acutance.operator import AttentionOperator


@register("featscale")
class FeatScale(Mitigation):
    """y ← y + s ⊙ mean(y) + t ⊙ (y − mean(y)), per channel, s and t learnt from 0 (https://arxiv.org/abs/2203.05962).

    The mean runs over all tokens, class token included: where some are padding, or the future, it is refused.

    Args:
        doubled: add the correction twice (gains 1 + 2s and 1 + 2t), as the authors' public DeiT code does;
            the paper and their CaiT and Swin code add it once.
    """

    ignores_first_values = True
    averages_tokens = True
    low: nn.Parameter
    high: nn.Parameter

    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        if not isinstance(doubled, bool):
            raise AcutanceError(f"featscale: doubled must be true or false, not {doubled!r}")
        self.doubled = doubled

    def build(self, shape: LayerShape) -> None:
        """One gain for the low and one for the high frequencies of every channel."""
        self.low = nn.Parameter(torch.zeros(shape.dim))
        self.high = nn.Parameter(torch.zeros(shape.dim))

    def output(self, u: Tensor, v: Tensor, v0: Tensor, A: AttentionOperator) -> Tensor:
        """u as it is; here A tells whether the mean that `features` takes would look at what is hidden."""
        visible = visible_keys(A)
        if A.causal or (visible is not None and (torch.compiler.is_compiling() or not visible.all())):
            raise AcutanceError(
                "featscale averages over all tokens, but a mask hides some of them (padding, another document, the "
                "future, what is out of reach), which the mean would let through: use it on batches without padding, "
                "uncompiled if there is a mask all the same; attnscale knows masks"
            )
        return u

    def epilogue(self, so_far: Epilogue) -> Epilogue | None:
        """Nothing to add, as there is no mask where a kernel is asked; causality is for `output` to refuse."""
        cls = type(self)
        does_nothing = cls.output is FeatScale.output and cls.values is Mitigation.values
        return so_far if does_nothing and not so_far.causal else None

    def features(self, y: Tensor, x: Tensor) -> Tensor:
        """Rescale the mean over tokens and what is left of it separately."""
        mean = y.mean(dim=-2, keepdim=True)
        correction = self.low.to(y.dtype) * mean + self.high.to(y.dtype) * (y - mean)
        return y + 2 * correction if self.doubled else y + correction
