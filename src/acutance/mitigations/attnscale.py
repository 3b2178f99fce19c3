"""AttnScale (Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis, 2203.05962)."""

import torch
from torch import nn

from acutance.attention import AttentionCall, Program
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("attnscale")
class AttnScale(Mitigation):
    """Ã = U + (1 + ω)(A − U), U = (1/N)11ᵀ, ω learnt per head from 0 (https://arxiv.org/abs/2203.05962).

    Computed as Ã v = (1 + ω) A v − ω U v, where U v is the mean of the values over tokens. Under a mask or causality U
    is uniform over the keys each query may see, so rows still sum to one. Attention dropout does not touch the mean.
    """

    def build(self, shape: LayerShape) -> None:
        self.gain = nn.Parameter(torch.zeros(shape.heads))

    def affine(self, so_far: Program, call: AttentionCall) -> Program | None:
        return so_far.sharpened(self.gain)
