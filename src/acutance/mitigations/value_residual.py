"""Value residual learning: ResFormer and SVFormer (2410.17897)."""

from typing import Literal

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall, Program
from acutance.errors import AcutanceError
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("value_residual")
class ValueResidual(Mitigation):
    """u = A (λ₁ v + λ₂ v⁰) in every layer after the first, ½ and ½ (https://arxiv.org/abs/2410.17897).

    Args:
        learn: "layer" or "head" learns λ₁ and λ₂, which start at 1 and 0.
        shared: v⁰ in place of v (λ₁ = 0, λ₂ = 1), as in SVFormer, whose later layers have no use for W_V.
    """

    requires = ("first_values",)

    def __init__(self, learn: Literal["layer", "head"] | None = None, shared: bool = False) -> None:
        super().__init__()
        self.learn, self.shared = learn, shared
        self.check_options()
        if shared and learn is not None:
            raise AcutanceError("value_residual: shared values have no weights to learn; leave learn or shared out")

    def build(self, shape: LayerShape) -> None:
        if self.learn is not None and shape.layer > 1:
            count = shape.kv_heads if self.learn == "head" else 1  # never 0-d, which sharded training refuses
            self.own, self.first = nn.Parameter(torch.ones(count)), nn.Parameter(torch.zeros(count))

    def values(self, v: Tensor, call: AttentionCall) -> Tensor:
        if self.learn is None or call.v0 is None:
            return super().values(v, call)
        own, first = (weight.to(v.dtype)[:, None, None] for weight in (self.own, self.first))
        return own * v + first * call.first_like(v)

    def program(self, so_far: Program | None, call: AttentionCall) -> Program | None:
        return None if so_far is None or self.learn is not None else self.affine(so_far, call)

    def affine(self, so_far: Program, call: AttentionCall) -> Program | None:
        if self.learn is not None or call.v0 is None:
            return so_far
        return so_far.mixed(1.0 if self.shared else 0.5)
