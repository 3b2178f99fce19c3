"""The small parts of a vision Transformer, under timm's names."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.models.kernels import mlp

Activation = Literal["gelu", "relu"]


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each to one token.

    The patches are rows of one matrix product: a convolution would leave the channels apart in memory, and every norm
    after it would have to gather them.
    """

    def __init__(self, in_chans: int, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, patches, dim), row by row."""
        side = self.proj.kernel_size[0]
        cut = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (batch, channels, down, side, across, side)
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Mlp(nn.Module):
    """Two linear layers with a GELU between, or a ReLU."""

    def __init__(self, dim: int, hidden: int, dropout: float, activation: Activation = "gelu") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU() if activation == "gelu" else nn.ReLU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself."""
        if mlp.is_available(x, self.fc1, self.fc2) and self._can_fuse():
            return mlp.mlp(x, self.fc1, self.fc2)
        out: Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))
        return out

    def _can_fuse(self) -> bool:
        """Whether nothing but fc2(GELU(fc1(x))) is done: no dropout, nothing hooked to the layers."""
        plain = type(self.act) is nn.GELU and self.act.approximate == "none" and not (self.training and self.drop.p > 0)
        return plain and all(map(_is_bare, (self.fc1, self.act, self.fc2, self.drop)))


class LayerScale(nn.Module):
    """A learnt gain per channel on a residual branch (https://arxiv.org/abs/2103.17239)."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        """Scale every channel."""
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: training skips the branch for some samples, at random, and scales up the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Zero whole samples."""
        if self.rate == 0 or not self.training:
            return x
        keep = 1 - self.rate
        kept = torch.empty((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
        return x * (kept / keep if keep > 0 else kept)

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"rate={self.rate:g}"


def _is_bare(module: nn.Module) -> bool:
    """Whether a module's work may be done without calling it: no hooks, no forward of its own, not compiled alone."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not any(hooks) and "forward" not in module.__dict__ and module._compiled_call_impl is None
