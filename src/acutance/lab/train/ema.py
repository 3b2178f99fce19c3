"""A running mean of the weights, which is often the better model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """mean ← decay · mean + (1 − decay) · weights after every step, for parameters and floating buffers.

    Made after sharding, so that sharded weights have a sharded mean. Whole-numbered buffers are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = dict(_averaged(model))
        self.mean = {name: value.detach().clone() for name, value in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Count the weights as they are now."""
        torch._foreach_lerp_(list(self.mean.values()), list(self._weights.values()), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the mean; afterwards its own weights again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, weight in zip(self.mean.values(), self._weights.values(), strict=True):
            own = weight.clone()
            weight.copy_(mean)
            mean.copy_(own)


def _averaged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            yield name, buffer
