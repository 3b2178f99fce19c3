"""Sites whose weights are found by the usual names, and whose norms and gains are found by running the block once."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.sites.discovery import Surroundings, changes_output, discover, is_norm
from acutance.sites.patched import PatchedSite
from acutance.sites.projection import Projections, Sizes, by_names, output_of, shape_of


class NamedSite(PatchedSite):
    """One attention. Its weights are looked up when asked for: reading tokens needs none of them."""

    @cached_property
    def _found(self) -> tuple[Projections, Sizes]:
        return by_names(self.name, self.block, self.attention)

    def projections(self) -> Projections:
        """By their names."""
        return self._found[0]

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Query heads."""
        return self._found[1].heads

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        """Heads of keys and values."""
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
    def surroundings(self) -> Surroundings:
        """What the block does around its attention."""
        projection = self.projections().output.module
        inside = self.attention is not self.block and projection in set(self.attention.modules())
        width = self.dim if inside else shape_of(projection)[1]
        return discover(self.block, self.attention, None if inside else projection, self.dim, width)

    def pre_norm(self) -> nn.Module | None:
        """The norm before the attention; None in Post-LN models such as BERT."""
        source = self.surroundings.source
        if source is None and any(map(is_norm, self.block.modules())):
            raise self._unknown("which of its norms comes before the attention")
        return None if source is self.block else source

    def pre_norm_gain(self) -> Tensor | None:
        """The norm's weight; Gemma's norms, and some others, multiply by 1 + weight."""
        gain, norm = super().pre_norm_gain(), self.pre_norm()
        return gain if gain is None or norm is None or not _adds_one(norm) else 1 + gain

    def between(self) -> str | None:
        """A norm or a gate between the attention and W_proj, as in BitNet and Qwen3-Next."""
        changes = self._changes_output
        if changes is None:  # the attention does not run on random tokens
            changes = any(map(is_norm, self.attention.modules()))
        return f"a norm or a gate of {type(self.attention).__name__} before W_proj" if changes else None

    @cached_property
    def _changes_output(self) -> bool | None:
        """Asked of the first layer whose attention is of the same class; None where it is not known."""
        first = next(site for site in self.stack.sites if type(site.attention) is type(self.attention))
        if isinstance(first, NamedSite) and first is not self:
            return first._changes_output
        return changes_output(self.stack.root, self.block, self.attention, self.projections().output.module, self.dim)

    def post_norm(self) -> nn.Module | None:
        """The norm of the attention branch, as in Gemma 2 and 3, OLMo 2 and GLM-4."""
        return self._followed().post_norm

    def branch_gain(self) -> Tensor | None:
        """LayerScale's gain, or Granite's number for all channels."""
        gain = self._followed().gain
        if gain is None or isinstance(gain, Tensor):
            return gain
        return torch.full((self.dim,), float(gain)).to(self.projection_weight())

    def _followed(self) -> Surroundings:
        if not self.surroundings.is_complete:
            raise self._unknown("what it does to the attention's output")
        return self.surroundings

    def _unknown(self, what: str) -> AcutanceError:
        kind = type(self.block).__name__
        return AcutanceError(
            f"{self.name}: {kind} does not run on random tokens, so {what} is not known: describe the model in a "
            "Library of its own"
        )


def _adds_one(norm: nn.Module) -> bool:
    """Whether the norm multiplies by 1 + weight, tried on tokens that are normalised already."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    token = 1 - 2 * (torch.arange(weight.shape[-1], device=weight.device) % 2).to(weight.dtype)
    with torch.no_grad():
        gain = token * (norm.forward(token) - norm.forward(-token)) / 2  # without its bias
        return bool((gain - weight).abs().sum() > (gain - 1 - weight).abs().sum())
