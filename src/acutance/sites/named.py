"""Sites whose weights are found by the names that everybody uses."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from acutance.sites.huggingface_norms import adds_one, norm_before
from acutance.sites.patched import PatchedSite
from acutance.sites.projection import Projections, Sizes, by_names, changes_output, output_of
from acutance.sites.structure import path_of

LAYER_SCALES = ("layer_scale1.lambda1", "layer_scale1.gamma", "lambda_1", "ls1.gamma", "gamma_1")
NORMS_AROUND_THE_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # then that of the attention is too


class NamedSite(PatchedSite):
    """One attention; its weights are looked for when somebody asks: reading tokens needs none."""

    @cached_property
    def _found(self) -> tuple[Projections, Sizes]:
        return by_names(self.name, self.block, self.attention)

    def projections(self) -> Projections:
        """By their names."""
        return self._found[0]

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Of the queries."""
        return self._found[1].heads

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        """Of the keys and values."""
        return self._found[1].kv_heads

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """Channels of one head's values."""
        return self._found[1].head_dim

    @property
    def dim(self) -> int:  # type: ignore[override]
        """Channels of the residual stream."""
        return self._found[1].dim

    def output_projection(self) -> nn.Module | None:
        """W_proj, which BERT and others keep beside the attention; None under an unknown name."""
        return output_of(self.block, self.attention)

    @cached_property
    def _norm(self) -> nn.Module | None:
        return norm_before(self.block, path_of(self.block, self.attention))

    def pre_norm(self) -> nn.Module | None:
        """The norm before the attention; None in Post-LN models such as BERT."""
        return self._norm

    def pre_norm_gain(self) -> Tensor | None:
        """Gemma's norms, and those of some others, store how far their gain is from one."""
        gain, norm = super().pre_norm_gain(), self.pre_norm()
        return gain if gain is None or norm is None or not adds_one(norm) else 1 + gain

    def between(self) -> str | None:
        """Told by the code that calls the attention."""
        cls: Any = type(self.attention)
        return f"what {cls.__name__} does before W_proj, a norm or a gate," if changes_output(cls) else None

    def post_norm(self) -> nn.Module | None:
        """Gemma 2 and 3, OLMo 2 and GLM-4 normalise what the attention adds."""
        own = getattr(self.block, "post_self_attn_layernorm", None)
        if own is None and any(hasattr(self.block, name) for name in NORMS_AROUND_THE_MLP):
            own = getattr(self.block, "post_attention_layernorm", None)  # elsewhere a name for the norm before the MLP
        return own if isinstance(own, nn.Module) else None

    def branch_gain(self) -> Tensor | None:
        """LayerScale's gain, wherever the block keeps it, or Granite's number for all channels."""
        multiplier = getattr(self.block, "residual_multiplier", 1.0)
        if multiplier != 1.0:
            return torch.full((self.dim,), multiplier).to(self.projection_weight())
        for path in LAYER_SCALES:
            value: object = self.block
            for name in path.split("."):
                value = getattr(value, name, None)
            if isinstance(value, Tensor):
                return value
        return None
