"""Random numbers for corruptions and attacks: drawn on the CPU, so that every device sees the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.lab.data.seeds import generator


class Draws:
    """A stream of random numbers that is a function of `numbers` alone, put onto a device."""

    def __init__(self, device: torch.device | str, *numbers: int) -> None:
        self.device, self._generator = torch.device(device), generator("cpu", *numbers)

    def normal(self, *shape: int) -> Tensor:
        """Zero mean, unit deviation."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Between `low` and `high`."""
        return (low + (high - low) * torch.rand(shape, generator=self._generator)).to(self.device)

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """From `low` to `high` − 1."""
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def poisson(self, rate: Tensor) -> Tensor:
        """Counts with this mean."""
        return torch.poisson(rate.cpu(), generator=self._generator).to(self.device)
