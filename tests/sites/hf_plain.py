"""The mitigations as a plain attention function for transformers: dense, v⁰ in a dictionary, nothing of ours."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

NAME = "plain_formula"


@dataclass
class Plain:
    """What the formulas need, layer by layer: λ̃, ω, and FeatScale's s and t; None leaves a part out."""

    attentions: list[nn.Module]
    strength: list[Tensor | float] | None = None
    gain: list[Tensor] | None = None
    scales: list[tuple[Tensor, Tensor]] | None = None
    first: dict[str, Tensor] = field(default_factory=dict)  # v⁰ of the forward pass under way

    def attention(self, module, query, key, value, attention_mask, scaling=None, softcap=None, position_bias=None, **_):
        layer = next((n for n, known in enumerate(self.attentions) if known is module), None)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        for term in (attention_mask, position_bias):
            scores = scores if term is None else scores + term
        A = scores.softmax(-1)
        if layer is not None and self.gain is not None:
            hidden = torch.zeros_like(A, dtype=torch.bool) if attention_mask is None else attention_mask < -1e30
            U = torch.where(hidden, 0.0, torch.ones_like(A))
            U = U / U.sum(-1, keepdim=True)
            A = U + (1 + self.gain[layer][:, None, None]) * (A - U)
        u = A @ value
        if layer is not None and self.strength is not None:
            if layer == 0:
                self.first["v"] = value
            strength = self.strength[layer]
            strength = strength[:, None, None] if isinstance(strength, Tensor) else strength
            u = u + strength * (self.first["v"] - value)
        return u.transpose(1, 2).contiguous(), None

    def install(self, model: nn.Module, projections: list[nn.Module]) -> None:
        """Make the model use the formulas; `projections` are its W_proj."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, eager_mask)
        model.set_attn_implementation(NAME)
        for layer, projection in enumerate(projections if self.scales is not None else []):
            low, high = self.scales[layer]

            def rescale(_module, _args, y, low=low, high=high):
                mean = y.mean(-2, keepdim=True)
                return y + low * mean + high * (y - mean)

            projection.register_forward_hook(rescale)
