"""Grouped heads: query head h uses key head h // (heads / key heads)."""

from torch import Tensor


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """The tensor with each of its heads repeated for the group of query heads that share it."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), dim=1)
