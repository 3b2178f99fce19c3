"""AttnScale (Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis, 2203.05962)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acutance.kernels.epilogue import Epilogue
from acutance.kernels.heads import repeat_heads
from acutance.mitigations.base import LayerShape, Mitigation, register
from acutance.operator import AttentionOperator


@register("attnscale")
class AttnScale(Mitigation):
    """Ã = U + (1 + ω)(A − U), U = (1/N)11ᵀ, ω learnt per head from 0 (https://arxiv.org/abs/2203.05962).

    Computed as Ã v = (1 + ω) A v − ω U v, so no attention matrix is needed: U v is the mean of the values
    over tokens. Under a mask or causality U is uniform over the keys each query may see, so that the rows
    of Ã still sum to one and nothing hidden leaks in. Attention dropout touches A v, not the mean.
    """

    ignores_first_values = True
    gain: nn.Parameter

    def build(self, shape: LayerShape) -> None:
        """One ω per head."""
        self.gain = nn.Parameter(torch.zeros(shape.heads))

    def output(self, u: Tensor, v: Tensor, v0: Tensor, A: AttentionOperator) -> Tensor:
        """(1 + ω) u − ω U v."""
        gain = self.gain.to(u.dtype)[:, None, None]
        return (1 + gain) * u - gain * visible_mean(A, v)

    def epilogue(self, so_far: Epilogue) -> Epilogue | None:
        """A contrast of 1 + ω, unless a subclass does something else."""
        cls = type(self)
        if cls.output is not AttnScale.output or cls.values is not Mitigation.values:
            return None
        return so_far.sharpened(1 + self.gain)


def visible_mean(A: AttentionOperator, v: Tensor) -> Tensor:
    """U v: the mean of the values that each query of A can see; one row where all see the same."""
    v = repeat_heads(v, A.heads)
    if A.mask4 is None and not A.causal:
        return v.mean(dim=-2, keepdim=True)
    equal_scores = torch.zeros_like(A.q)
    uniform = AttentionOperator(equal_scores, A.k.detach(), mask=visible_keys(A), causal=A.causal)
    return uniform.apply(v)  # spelt @, compiling would break the graph


def visible_keys(A: AttentionOperator) -> Tensor | None:
    """A's mask as bool: a bias hides keys by −∞ or the lowest number there is."""
    mask = A.mask4
    if mask is None or not mask.is_floating_point():
        return mask
    return mask > torch.finfo(mask.dtype).min / 2
