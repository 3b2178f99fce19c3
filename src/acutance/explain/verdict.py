"""One layer's spectrum, and what it says in a word and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from acutance.explain.dominance import TIE, Dominance, Share, growth
from acutance.spectral_theory import sharpening_bound

Verdict = Literal["smoothing", "sharpening", "neutral", "unknown"]


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """The eigenvalues of one layer's H, per head and whole, and with data which family dominates."""

    layer: int  # 1 is the first
    heads: NDArray[np.complex128]  # (heads, head_dim): of every H_h, less its dim − head_dim zeros
    head_symmetry: NDArray[np.float64]  # (heads,)
    eigenvalues: NDArray[np.complex128] | None = None  # (dim,): of the whole H; None if it was left out for its size
    symmetry: float | None = None  # cosine between the whole H and its transpose
    norm: str = "none"  # the pre-norm's weight: folded, left out, or none
    dominance: Dominance | None = None  # with data only

    @property
    def spectrum(self) -> NDArray[np.complex128]:
        """Of the whole H where known, else of all heads."""
        return self.heads.ravel() if self.eigenvalues is None else self.eigenvalues

    @property
    def decides(self) -> bool:
        """Whether `spectrum` is that of the whole H: the spectra of several heads do not determine it."""
        return self.eigenvalues is not None or len(self.heads) == 1

    @property
    def smoothing_gain(self) -> float:
        """max_j |1 + λ_j|: the growth of the smoothest component (μ = 1)."""
        return float(np.abs(1 + self.spectrum).max())

    @property
    def strongest(self) -> complex:
        """The λ behind `smoothing_gain`."""
        return complex(self.spectrum[np.abs(1 + self.spectrum).argmax()])

    @property
    def negative_share(self) -> float:
        """The share of eigenvalues with a negative real part."""
        return float((self.spectrum.real < 0).mean())

    @property
    def quantiles(self) -> tuple[float, float, float, float, float]:
        """Minimum, 5 %, median, 95 % and maximum of the eigenvalues' real parts."""
        low, five, half, most, high = np.quantile(self.spectrum.real, [0, 0.05, 0.5, 0.95, 1]).tolist()
        return low, five, half, most, high

    @property
    def bound(self) -> float:
        """−2/(1 + μ_min) at the largest μ_min seen, which is the strictest; at 0 without data."""
        return sharpening_bound(0.0 if self.dominance is None else float(self.dominance.mu_min_highest.max()))

    @property
    def crosses_bound(self) -> bool:
        """Whether a spectrum without positive eigenvalues has one below the bound: for that one μ = 1 beats μ_min."""
        real = self.spectrum.real
        rounding = TIE * float(np.abs(self.spectrum).max())
        return bool(self.decides and real.max() <= rounding and real.min() < self.bound)

    @property
    def verdict(self) -> Verdict:
        """The family that dominates I + H⊗A: in most samples, or without data if A's smallest eigenvalue is 0."""
        if not self.decides:
            return "unknown"
        smoothing, sharpening = self._shares()
        if max(smoothing, sharpening) <= 0.5:
            return "neutral"
        return "smoothing" if smoothing > sharpening else "sharpening"

    @property
    def reason(self) -> str:
        """The verdict in words."""
        if not self.decides:
            return "the spectra of the heads do not decide for their sum: explain(…, whole=True) finds that of H"
        share = None if self.dominance is None else self.dominance.predicted
        return self._from_weights() if share is None else self._from_data(share)

    def _shares(self) -> tuple[float, float]:
        if self.dominance is not None and (share := self.dominance.predicted) is not None:
            return share.smoothing, share.sharpening
        lead = growth(self.spectrum).max()  # against 0, which is |1 + λμ|² − 1 at μ = 0
        tie = abs(lead) <= TIE * np.abs(self.spectrum).max()
        return (0.0, 0.0) if tie else (float(lead > 0), float(lead < 0))

    def _gain(self) -> str:
        return f"max|1+λ| = {self.smoothing_gain:.3f} (λ = {format_complex(self.strongest)})"

    def _from_weights(self) -> str:
        words = {
            "smoothing": "is above 1: the constant component grows fastest",
            "sharpening": "is below 1: every constant component shrinks against the rest",
            "neutral": "is 1: neither family dominates",
        }
        return f"{self._gain()} {words[self.verdict]}{self._crossing()}"

    def _from_data(self, share: Share) -> str:
        families = {
            "smoothing": f"μ = 1 in {share.smoothing:.0%}",
            "sharpening": f"μ ≠ 1 in {share.sharpening:.0%}",
            "neutral": f"μ = 1 in {share.smoothing:.0%}, μ ≠ 1 in {share.sharpening:.0%}",
        }
        return f"{families[self.verdict]}: {self._gain()}{self._crossing()}"

    def _crossing(self) -> str:
        if not self.crosses_bound:
            return ""
        return f"; λ = {self.spectrum.real.min():.2f} lies beyond −2/(1+μ_min) = {self.bound:.2f}"


def format_complex(z: complex) -> str:
    """Short, and real where it is."""
    return f"{z.real:.2g}" if abs(z.imag) < 5e-3 * abs(z) else f"{z.real:.2g}{z.imag:+.2g}i"
