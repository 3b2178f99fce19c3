"""Masks: bool (True takes part) or an additive float bias, always as (B|1, H|1, N|1, M) views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.errors import AcutanceError, ShapeError

if TYPE_CHECKING:
    from acutance.operator import AttentionOperator


def as_four_axes(mask: Tensor, shape: tuple[int, int, int, int], *, exponential: bool) -> Tensor:
    """A view of the mask that broadcasts against (B, H, N, M); a (B, M) bool mask is a mask of the keys."""
    batch, _, _, keys = shape
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AcutanceError(f"the mask is {mask.dtype}; give mask.bool(), True where a token takes part")
    if mask.is_floating_point() and not exponential:
        raise AcutanceError("an additive float mask needs an exponential kernel; give a bool mask instead")
    if mask.dtype == torch.bool and tuple(mask.shape) == (batch, keys):
        return mask[:, None, None, :]
    axes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(axes) != 4 or any(size not in (1, full) for size, full in zip(axes, shape, strict=True)):
        raise ShapeError(
            f"mask {tuple(mask.shape)} is neither a key mask (batch, keys) = {(batch, keys)} "
            f"nor broadcastable to (batch, heads, queries, keys) = {tuple(shape)}"
        )
    return mask.view(axes).expand(-1, -1, -1, keys)


def seen_keys(A: AttentionOperator, rows: slice) -> int:
    """How many of the first keys these rows may look at: all of them, unless A is causal."""
    queries, keys = A.shape[-2:]
    return min(keys, max(1, rows.stop + keys - queries)) if A.causal else keys


def mask_rows(A: AttentionOperator, rows: slice) -> Tensor | None:
    """The mask, causality included, of some query rows against the keys they may see."""
    mask, keys = A.mask4, seen_keys(A, rows)
    if mask is not None:
        mask = mask[..., :keys] if mask.size(-2) == 1 else mask[..., rows, :keys]
    if not A.causal:
        return mask
    last_seen = torch.arange(rows.start, rows.stop, device=A.device) + (A.shape[-1] - A.shape[-2])
    seen = torch.arange(keys, device=A.device) <= last_seen[:, None]
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def without_dead_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask with fully masked rows opened, and where those rows are.

    A softmax over nothing is NaN, in some back-ends in its gradient alone: such a row sees everything, and
    its output is set to zero afterwards.
    """
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    dead = ~visible.any(dim=-1, keepdim=True)
    return (mask | dead if mask.dtype == torch.bool else mask.masked_fill(dead, 0.0)), dead


def add_mask(log_weights: Tensor, mask: Tensor | None) -> Tensor:
    """Log-weights with masked entries at −∞, or with the bias added."""
    if mask is None:
        return log_weights
    if mask.dtype == torch.bool:
        return log_weights.masked_fill(~mask, -torch.inf)
    return log_weights + mask
