"""ContraNorm (ContraNorm: A Contrastive Learning Perspective on Oversmoothing and Beyond, 2303.06562)."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.mitigations.base import Mitigation, register


@register("contranorm")
class ContraNorm(Mitigation):
    """x ← x − s softmax(x̂ x̂ᵀ/τ) x on the stream after the block, x̂ = x/‖x‖ (https://arxiv.org/abs/2303.06562).

    Not the identity at the start, and it learns nothing. Each token's softmax runs over the tokens that it sees in
    attention. The LayerNorm of the paper is the model's next one. The authors put the formula right in front of it
    (vision), or behind the attention's residual sum (BERT); here it changes the stream itself.

    Args:
        strength: s, from 1e-4 to 0.2 in the paper; zero leaves the model as it is.
        temperature: τ.
        form: "plain" is the formula above, of the authors' vision code; "identity" has (1 + s) x in place of x, as
            their BERT code.
    """

    positional = "strength"
    requires = ("square", "all_tokens")

    def __init__(
        self, strength: float = 0.05, temperature: float = 1.0, form: Literal["plain", "identity"] = "plain"
    ) -> None:
        super().__init__()
        self.strength, self.temperature, self.form = strength, temperature, form
        self.check_options()
        if self.temperature <= 0:
            raise AcutanceError(f"contranorm: temperature divides the similarities, it cannot be {temperature:g}")

    @property
    def is_idle(self) -> bool:
        return self.strength == 0

    def stream(self, x_in: Tensor, x_out: Tensor, call: AttentionCall) -> Tensor:
        unit = F.normalize(x_out, dim=-1)
        alike = call.among_seen(unit, unit, 1 / self.temperature).apply(x_out[:, None])[:, 0].to(x_out.dtype)
        kept = 1 + self.strength if self.form == "identity" else 1.0
        return kept * x_out - self.strength * alike
