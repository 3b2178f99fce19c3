"""Mitigations as numbers: what they do before and after attention. Kernels and plain torch read the same ones."""

from typing import NamedTuple

from torch import Tensor

from acutance.attention.call import AttentionCall


class Program(NamedTuple):
    """u = (1 + ω) A w − ω U w + λ (v⁰ − w) with w = v + ρ (v⁰ − v); U averages over all tokens that a token sees.

    `NOTHING` is plain attention. Each method adds one mitigation to those before. The numbers are raw parameters, and
    kernels expand them, so that no small operations are launched per layer.
    """

    strength: Tensor | float = 0.0  # λ, the same for all heads or one each
    gain: Tensor | None = None  # ω, one per head; None is 0
    residual: Tensor | float = 0.0  # ρ, the same for all heads of the values or one each
    detach: bool = False  # whether the gradient stops at v⁰

    def corrected(self, strength: Tensor | float, *, detach: bool = False) -> "Program | None":
        """u + λ (v⁰ − w); None where v⁰ would be needed both with and without its gradient."""
        if self.uses_first_values and detach != self.detach:
            return None
        both = strength if _is_zero(self.strength) else self.strength + strength
        return Program(both, self.gain, self.residual, detach)

    def sharpened(self, gain: Tensor) -> "Program":
        """(1 + ω) u − ω U w, for the u so far, its correction included."""
        strength = self.strength if _is_zero(self.strength) else (1 + gain) * self.strength
        both = gain if self.gain is None else gain + self.gain + gain * self.gain
        return Program(strength, both, self.residual, self.detach)

    def mixed(self, residual: Tensor | float, *, detach: bool = False) -> "Program | None":
        """w + ρ (v⁰ − w), for the w so far."""
        if self.uses_first_values and detach != self.detach:
            return None
        both = residual if _is_zero(self.residual) else 1 - (1 - self.residual) * (1 - residual)
        return Program(self.strength, self.gain, both, detach)

    @property
    def uses_first_values(self) -> bool:
        return not (_is_zero(self.strength) and _is_zero(self.residual))

    def values(self, v: Tensor, call: AttentionCall) -> Tensor:
        if self._first(call, self.residual) is None:
            return v
        first = call.first_like(v)
        return v + _by_head(self.residual, v) * ((first.detach() if self.detach else first) - v)

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        """What is done after attention, in plain torch, given u = A w."""
        if self.gain is not None:
            gain = _by_head(self.gain, u)
            u = (1 + gain) * u - gain * call.visible_mean(w)
        first = self._first(call, self.strength)
        return u if first is None else u + _by_head(self.strength, u) * (call.rows(first, u) - call.rows(w, u))

    def _first(self, call: AttentionCall, share: Tensor | float) -> Tensor | None:
        if _is_zero(share) or call.v0 is None:
            return None
        return call.v0.detach() if self.detach else call.v0


NOTHING = Program()


def _by_head(number: Tensor | float, x: Tensor) -> Tensor | float:
    """Against (heads, tokens, head_dim)."""
    return number.to(x.dtype)[:, None, None] if isinstance(number, Tensor) else number


def _is_zero(number: Tensor | float) -> bool:
    return not isinstance(number, Tensor) and number == 0
