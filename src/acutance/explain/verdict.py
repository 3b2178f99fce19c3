"""One layer's spectrum, which family of eigenvalues dominates it, and what that says in a word and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from acutance.attention.spectra import DENSE_TOKENS
from acutance.explain.spectral_theory import TIE, families, furthest_beyond, sharpening_bound

Verdict = Literal["smoothing", "sharpening", "neutral", "unknown"]
EXACT_MU = f"Read at most {DENSE_TOKENS} tokens a sample: there all eigenvalues of A are found"


@dataclass(frozen=True)
class Share:
    """In which share of cases each family dominates; what is missing to one is ties."""

    smoothing: float  # μ = 1
    sharpening: float  # any other μ

    def __str__(self) -> str:
        return f"{100 * self.smoothing:.4g}/{100 * self.sharpening:.4g}"


@dataclass(frozen=True)
class Outcome:
    """What HFC/LFC (spectral norm) did from one place to the next, against the prediction; NaN without one."""

    fell: float  # share of samples in which it fell: smoothed
    agreement: float  # share of samples in which it did what the dominating family says
    change: float  # mean of log(after / before); negative is smoothing
    fell_if_smoothing: float  # P(fell | predicted smoothing); NaN if that never was
    rose_if_sharpening: float  # P(rose | predicted sharpening)
    correlation: float  # Spearman's, of the predicted with the measured change; NaN if one of them does not vary

    @property
    def base_rate(self) -> float:
        """What always guessing the commoner outcome would score: an agreement means little unless it is above."""
        return max(self.fell, 1 - self.fell)


@dataclass(frozen=True, eq=False)
class Dominance:
    """Which family dominates one layer's I + H⊗A over samples, per head, and what the tokens did."""

    samples: int
    mu_min_by_sample: NDArray[np.float64]  # (samples, heads): the smallest real part of A's spectrum
    mu_largest_by_sample: NDArray[np.float64]  # (samples, heads): the largest |μ| but that of the constant mode
    mu_error: float  # the largest residual ‖Az − μz‖; 0 if all eigenvalues of A were found
    heads: tuple[Share, ...]  # I + H_h⊗A_h, each head with its own part of H
    whole: tuple[Share, ...] | None  # I + H⊗A_h, each head's attention with the layer's whole H
    predicted: Share | None  # for the layer, once per sample; None for several heads without the whole H
    undecided: float  # share of samples in which the errors of λ and μ leave the prediction open; NaN likewise
    predicted_change: float  # log of the long-run factor of HFC/LFC per layer, mean over samples; NaN likewise
    branch: Outcome  # X → X + attention branch
    block: Outcome  # X → the block's output

    @property
    def mu_min(self) -> NDArray[np.float64]:
        """(heads,): the smallest real part of A's spectrum, mean over samples."""
        mean: NDArray[np.float64] = self.mu_min_by_sample.mean(0)
        return mean

    @property
    def mu_min_highest(self) -> float:
        """The largest μ_min of any sample and head: the strictest for a negative λ."""
        return float(self.mu_min_by_sample.max())


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
        """Every eigenvalue of the whole H if known, else of all heads; less the zeros of an H of lower rank.

        If values have fewer channels than tokens (grouped queries), dim − rank eigenvalues are 0 whatever was learnt:
        they would only dilute what is said of the others.
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
    def strongest(self) -> complex:
        """The λ with the largest |1 + λ|."""
        values = self.spectrum if self.deciding is None else self.deciding
        return complex(values[np.abs(1 + values).argmax()])

    @property
    def smoothing_gain(self) -> float:
        """max_j |1 + λ_j|: the growth of the smoothest component (μ = 1)."""
        return abs(1 + self.strongest)

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
    def mean_symmetry(self) -> float:
        """That of the whole H if known, else the mean over heads."""
        return float(self.head_symmetry.mean()) if self.symmetry is None else self.symmetry

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
    def crossing_words(self) -> str:
        """Where the `crossing` λ lies; empty if there is none."""
        if self.crossing is None:
            return ""
        bound = f"−2/(1+μ_min) = {self.bound:.3g}"
        where = f"beyond {bound}" if self.crossing.real < self.bound else f"outside the disc over {bound} to 0"
        return f"λ = {format_complex(self.crossing)} lies {where}"

    @property
    def verdict(self) -> Verdict:
        """The family that dominates I + H⊗A: in most samples, or without data if A's smallest eigenvalue is 0."""
        if self.deciding is None:
            return "unknown"
        if self.dominance is not None and (share := self.dominance.predicted) is not None:
            smoothing, sharpening, undecided = share.smoothing, share.sharpening, self.dominance.undecided
        else:
            found = families(torch.from_numpy(self.deciding), torch.zeros(1, dtype=torch.float64), self.error)
            lean = float(found.leaning)
            smoothing, sharpening, undecided = float(lean > 0), float(lean < 0), float(found.undecided)
        if max(smoothing, sharpening) <= 0.5:
            return "unknown" if max(smoothing, sharpening) + undecided > 0.5 else "neutral"
        return "smoothing" if smoothing > sharpening else "sharpening"

    @property
    def reason(self) -> str:
        """The verdict in words."""
        if self.deciding is None:
            return "the spectra of the heads do not decide for their sum: explain(…, whole=True) finds that of H"
        gain = f"max|1+λ| = {self.smoothing_gain:.3f} (λ = {format_complex(self.strongest)})"
        seen, verdict = self.dominance, self.verdict
        if verdict == "unknown":  # because λ or μ, whichever is the worse, is not known well enough
            if seen is None or seen.mu_error * abs(self.strongest) <= self.error:
                return f"{gain} is known to {self.error:.1g} only: explain(…, whole=True) finds it exactly"
            return (
                f"in {seen.undecided:.0%} of samples the families differ by less than their error: μ of A is known to "
                f"{seen.mu_error:.1g} only. {EXACT_MU}"
            )
        crossing = f"; {self.crossing_words}" if self.crossing_words else ""
        if seen is not None and seen.predicted is not None:
            constant, varying = f"μ = 1 in {seen.predicted.smoothing:.0%}", f"μ ≠ 1 in {seen.predicted.sharpening:.0%}"
            shares = {"smoothing": constant, "sharpening": varying, "neutral": f"{constant}, {varying}"}
            return f"{shares[verdict]}: {gain}{crossing}"
        words = {
            "smoothing": "is above 1: the constant component grows fastest",
            "sharpening": "is below 1: every constant component shrinks against the rest",
            "neutral": "is 1: neither family dominates",
        }
        return f"{gain} {words[verdict]}{crossing}"


def format_complex(z: complex) -> str:
    """Short, and real if it is; a real H has the conjugate of every other too."""
    return f"{z.real:.3g}" if abs(z.imag) < 5e-3 * abs(z) else f"{z.real:.3g}±{abs(z.imag):.3g}i"


def rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Spearman's: Pearson's correlation of the ranks, ties sharing their mean rank; NaN if either does not vary."""
    first, second = _ranks(a), _ranks(b)
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[where]
    return mean
