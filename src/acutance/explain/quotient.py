"""Tokens up to a constant: what is left when the mode μ = 1, which all attention shares, is taken out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Quotient:
    """Coordinates (..., N − 1, C) of tokens (..., N, C) up to a constant token.

    Constant tokens stay constant under every A. So A, and a layer, act on these coordinates too, and their eigenvalues
    there are all but those on constant tokens: μ = 1 is gone, once, without being found first.
    """

    def __init__(self, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        # The reflection that exchanges the constant unit vector and the first axis.
        normal = torch.full((tokens, 1), tokens**-0.5, dtype=dtype, device=device)
        normal[0] -= 1
        self.normal = normal / normal.norm().clamp_min(torch.finfo(dtype).tiny)

    def lift(self, y: Tensor) -> Tensor:
        """Tokens with these coordinates; their mean is zero."""
        return self._reflect(F.pad(y, (0, 0, 1, 0)))

    def drop(self, x: Tensor) -> Tensor:
        """The coordinates of tokens."""
        return self._reflect(x)[..., 1:, :]

    def _reflect(self, x: Tensor) -> Tensor:
        reflected: Tensor = x - 2 * self.normal * (self.normal.mT @ x)
        return reflected
