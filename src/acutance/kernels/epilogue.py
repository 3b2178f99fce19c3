"""What a kernel adds to attention, so that the mitigations it stands for cost no pass of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Epilogue:
    """u = c·A w + (1 − c)·U w + λ (v⁰ − w) with w = v + ρ (v⁰ − v); U averages over all that a token sees.

    As it is made it is attention alone. Each method takes one mitigation more into account, after those before.
    """

    strength: Tensor | float = 0.0  # λ, the same for all heads or one each
    contrast: Tensor | None = None  # c, one per head; None is 1
    residual: Tensor | float = 0.0  # ρ, the same for all heads of the values or one each
    causal: bool = False  # whether a token sees only itself and earlier ones

    def corrected(self, strength: Tensor | float) -> Epilogue:
        """u + λ (v⁰ − w)."""
        return replace(self, strength=strength if _is_zero(self.strength) else self.strength + strength)

    def sharpened(self, contrast: Tensor) -> Epilogue:
        """c·u + (1 − c)·U w, for the u so far, its correction included."""
        strength = self.strength if _is_zero(self.strength) else contrast * self.strength
        return replace(
            self, contrast=contrast if self.contrast is None else contrast * self.contrast, strength=strength
        )

    def mixed(self, residual: Tensor | float) -> Epilogue:
        """w + ρ (v⁰ − w), for the w so far."""
        kept = (1 - self.residual) * (1 - residual)
        return replace(self, residual=residual if _is_zero(self.residual) else 1 - kept)

    @property
    def uses_first_values(self) -> bool:
        """Whether v⁰ occurs in it."""
        return not (_is_zero(self.strength) and _is_zero(self.residual))


def _is_zero(number: Tensor | float) -> bool:
    return not isinstance(number, Tensor) and number == 0
