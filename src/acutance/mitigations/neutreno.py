"""NeuTRENO (Mitigating Over-smoothing in Transformers via Regularized Nonlocal Functionals, 2312.00751)."""

from typing import Literal

import torch
from torch import nn

from acutance.attention import AttentionCall, Program
from acutance.errors import AcutanceError
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("neutreno")
class NeuTRENO(Mitigation):
    """u ← u + λ̃ (v⁰ − v): attention pulled back towards the first layer's values (https://arxiv.org/abs/2312.00751).

    The term is zero at the first layer, where v⁰ is v, so it is omitted there.

    Args:
        strength: λ̃. A constant adds no parameter and no state-dict key; zero leaves the model as it is.
        learn: None for a constant; "layer" or "head" learns one λ̃ per layer or per head.
        detach: stop the gradient from later layers into the first layer's values (the paper lets it flow).
        start: where a learnt λ̃ starts; by default at `strength`, or at 0 when patched into a trained model.
    """

    positional = "strength"
    requires = ("first_values",)
    learnt_strength: nn.Parameter | None

    def __init__(
        self,
        strength: float = 0.6,
        learn: Literal["layer", "head"] | None = None,
        detach: bool = False,
        start: float | None = None,
    ) -> None:
        super().__init__()
        self.strength, self.learn, self.detach, self.start = strength, learn, detach, start
        self.check_options()
        if start is not None and learn is None:
            raise AcutanceError("neutreno: start is for a learnt strength; give learn='layer' or 'head' with it")
        self.register_parameter("learnt_strength", None)

    def build(self, shape: LayerShape) -> None:
        """A learnt λ̃ for every layer but the first, where it would never receive a gradient."""
        if self.learn is None or shape.layer == 1:
            return
        default = 0.0 if shape.pretrained else self.strength
        start = default if self.start is None else self.start
        count = shape.heads if self.learn == "head" else 1  # never 0-d, which sharded training refuses
        self.learnt_strength = nn.Parameter(torch.full((count,), start))

    @property
    def is_idle(self) -> bool:
        return self.strength == 0 and self.learn is None

    def affine(self, so_far: Program, call: AttentionCall) -> Program | None:
        strength = self.strength if self.learnt_strength is None else self.learnt_strength
        return so_far if call.v0 is None else so_far.corrected(strength, detach=self.detach)
