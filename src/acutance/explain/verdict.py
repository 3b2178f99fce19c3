"""One layer's spectrum, and what it says in a word and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from acutance.attention.spectra import DENSE_TOKENS
from acutance.explain.dominance import Dominance, Share
from acutance.explain.spectral_theory import TIE, families, furthest_beyond, sharpening_bound

Verdict = Literal["smoothing", "sharpening", "neutral", "unknown"]
EXACT_MU = f"Read at most {DENSE_TOKENS} tokens a sample: there all eigenvalues of A are found"


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """The eigenvalues of one layer's H, per head and whole, and with data which family dominates."""

    layer: int  # 1 is the first
    heads: NDArray[np.complex128]  # (heads, head_dim): of every H_h, less its dim − head_dim zeros
    head_symmetry: NDArray[np.float64]  # (heads,)
    eigenvalues: NDArray[np.complex128] | None = None  # (dim,): of the whole H; None if it is too large
    outer: NDArray[np.complex128] | None = None  # (k,): then the corners of their convex hull, found without H
    error: float = 0.0  # the largest residual of the outer eigenvalues that decide
    symmetry: float | None = None  # cosine between the whole H and its transpose
    norm: str = "none"  # the pre-norm's weight: folded, left out, or none
    dominance: Dominance | None = None  # with data only

    @property
    def spectrum(self) -> NDArray[np.complex128]:
        """Every eigenvalue of the whole H where known, else of all heads; less the zeros of an H of lower rank.

        Where values have fewer channels than tokens (grouped queries), dim − rank eigenvalues are 0 whatever was
        learnt: they would only dilute what is said of the others.
        """
        known = self.heads.ravel() if self.eigenvalues is None else self.eigenvalues
        learnt = known[known != 0]
        return learnt if len(learnt) else known

    @property
    def whole(self) -> NDArray[np.complex128] | None:
        """The eigenvalues of the whole H as far as they are known: all, or those that can dominate."""
        return self.outer if self.eigenvalues is None else self.eigenvalues

    @property
    def deciding(self) -> NDArray[np.complex128] | None:
        """What the verdict is made from; None for several heads alone, whose spectra do not determine their sum's."""
        return self.heads[0] if self.whole is None and len(self.heads) == 1 else self.whole

    @property
    def smoothing_gain(self) -> float:
        """max_j |1 + λ_j|: the growth of the smoothest component (μ = 1)."""
        return abs(1 + self.strongest)

    @property
    def strongest(self) -> complex:
        """The λ behind `smoothing_gain`."""
        values = self.spectrum if self.deciding is None else self.deciding
        return complex(values[np.abs(1 + values).argmax()])

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
    def mu_min(self) -> float:
        """The largest μ_min seen, which is the strictest for a negative spectrum; 0 is assumed without data."""
        return 0.0 if self.dominance is None else self.dominance.mu_min_highest

    @property
    def bound(self) -> float:
        """−2/(1 + μ_min), see `mu_min`."""
        return sharpening_bound(self.mu_min)

    @property
    def crossing(self) -> complex | None:
        """In a spectrum without positive real parts the λ at which μ = 1 beats μ_min the most; None if it nowhere does.

        A real one lies below `bound`, a complex one outside the disc over [bound, 0]: `spectral_theory.beyond_bound`.
        """
        if self.deciding is None or self.deciding.real.max() > TIE * np.abs(self.deciding).max() + self.error:
            return None
        return furthest_beyond(torch.from_numpy(self.deciding), self.mu_min, self.error)

    @property
    def crosses_bound(self) -> bool:
        """Whether there is a `crossing`."""
        return self.crossing is not None

    @property
    def verdict(self) -> Verdict:
        """The family that dominates I + H⊗A: in most samples, or without data if A's smallest eigenvalue is 0."""
        if self.deciding is None:
            return "unknown"
        smoothing, sharpening, undecided = self._shares()
        if max(smoothing, sharpening) <= 0.5:
            return "unknown" if max(smoothing, sharpening) + undecided > 0.5 else "neutral"
        return "smoothing" if smoothing > sharpening else "sharpening"

    @property
    def reason(self) -> str:
        """The verdict in words."""
        if self.deciding is None:
            return "the spectra of the heads do not decide for their sum: explain(…, whole=True) finds that of H"
        if self.verdict == "unknown":
            return self._from_error()
        share = None if self.dominance is None else self.dominance.predicted
        return self._from_weights() if share is None else self._from_data(share)

    def _shares(self) -> tuple[float, float, float]:
        if self.dominance is not None and (share := self.dominance.predicted) is not None:
            return share.smoothing, share.sharpening, self.dominance.undecided
        assert self.deciding is not None
        lam, mu = torch.from_numpy(self.deciding), torch.zeros(1, dtype=torch.float64)
        found = families(lam, mu, self.error)
        lean = float(found.leaning)
        return float(lean > 0), float(lean < 0), float(found.undecided)

    def _gain(self) -> str:
        return f"max|1+λ| = {self.smoothing_gain:.3f} (λ = {format_complex(self.strongest)})"

    def _from_error(self) -> str:
        """Whichever of λ and μ is known the worse is what to look at."""
        seen = self.dominance
        if seen is None or seen.mu_error * abs(self.strongest) <= self.error:
            return f"{self._gain()} is known to {self.error:.1g} only: explain(…, whole=True) finds it exactly"
        return (
            f"in {seen.undecided:.0%} of samples the families differ by less than their error: μ of A is known to "
            f"{seen.mu_error:.1g} only. {EXACT_MU}"
        )

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
        return "" if self.crossing is None else f"; {self.crossing_words}"

    @property
    def crossing_words(self) -> str:
        """Where the `crossing` λ lies."""
        assert self.crossing is not None
        where = f"−2/(1+μ_min) = {self.bound:.3g}"
        if self.crossing.real < self.bound:
            return f"λ = {format_complex(self.crossing)} lies beyond {where}"
        return f"λ = {format_complex(self.crossing)} lies outside the disc over {where} to 0"


def format_complex(z: complex) -> str:
    """Short, and real where it is; a real H has the conjugate of every other too."""
    return f"{z.real:.3g}" if abs(z.imag) < 5e-3 * abs(z) else f"{z.real:.3g}±{abs(z.imag):.3g}i"
