"""The theory of a repeated attention layer as executable statements (https://arxiv.org/abs/2401.04301).

One layer maps tokens X (N, d) to X + A X W. With H = Wᵀ that is vec(X) ↦ (I + H⊗A) vec(X), whose eigenvalues are
1 + λμ for every λ of H and μ of A. The largest of them decides what remains of X after many layers: constant tokens if
it belongs to μ = 1, tokens that differ if it belongs to any other μ.

`lam` and `mu` are eigenvalues, real or complex: (d,) of H and (N,) of a row-stochastic A, so that μ = 1 is among them.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from acutance.errors import AcutanceError, require_finite
from acutance.metrics import hfc_lfc_frobenius

Series = NDArray[np.float64]
TIE = 1e-6  # closer to a draw than this share of max|λ|, no family dominates
Family = Literal["constant", "varying", "neither"]


def layer_matrix(A: Tensor, H: Tensor) -> Tensor:
    """I + H⊗A, (dN, dN): what one layer does to vec(X), the columns of X one below the other."""
    product = torch.kron(H.contiguous(), A.contiguous())  # kron reads wrong entries from a transposed view
    return torch.eye(len(product), dtype=product.dtype, device=product.device) + product


def layer_eigenvalues(lam: Tensor, mu: Tensor) -> Tensor:
    """The eigenvalues 1 + λ_j μ_i of one layer, as a table (d, N)."""
    return 1 + lam[:, None] * mu[None, :]


def constant_mode(mu: Tensor) -> Tensor:
    """Where μ = 1 is in (..., N): its eigenvector is constant, because the rows of A sum to one."""
    return (mu - 1).abs().argmin(-1)


def other_eigenvalues(mu: Tensor) -> Tensor:
    """All μ but that of the constant mode, (..., N − 1)."""
    if mu.shape[-1] == 1:  # one token: μ = 1 stands in for its competitors, so that neither family dominates
        return mu
    others = torch.arange(mu.shape[-1], device=mu.device) != constant_mode(mu).unsqueeze(-1)
    return mu[others].view(*mu.shape[:-1], -1)


def growth(z: Any) -> Any:
    """|1 + z|² − 1 of an array or tensor: compares gains without the rounding of 1 + z for small z."""
    return 2 * z.real + (z * z.conj()).real


class Families(NamedTuple):
    """Whether the constant family (μ = 1) or the varying one (every other μ) grows faster, by max |1 + λμ|."""

    leaning: Tensor  # 1 where the constant family dominates, −1 where the varying one does, 0 for a tie or the unknown
    undecided: Tensor  # True where the errors of λ and μ leave open which dominates, and whether it is a tie
    log_rate: Tensor  # log of the factor of ‖HFC‖/‖LFC‖ per layer in the long run: negative is smoothing


def families(lam: Tensor, others: Tensor, error: float = 0.0, residuals: Tensor | float = 0.0) -> Families:
    """The families of I + H⊗A, of λ (..., d), known to `error`, and of the μ other than 1 (..., m), to `residuals`."""
    gains = growth(lam[..., :, None] * others[..., None, :])
    varying = gains.amax((-2, -1))
    constant, size = growth(lam).amax(-1).expand_as(varying), lam.abs().amax(-1)
    # Either gain is at most 1 + max|λ| and off by no more than the error; its square by twice their product. An error
    # of μ is multiplied by |λ|, and counts as far as it lifts a gain above the largest.
    steep = (lam.abs() * (1 + lam.abs()))[..., :, None]
    off = torch.as_tensor(residuals, dtype=gains.dtype, device=gains.device).expand(others.shape)[..., None, :]
    margin = 4 * error * (1 + size) + (gains + 2 * steep * off).amax((-2, -1)) - varying
    lead = constant - varying
    leaning = torch.where(lead.abs() <= TIE * size + margin, 0.0, lead.sign())
    rate = (torch.log1p(varying) - torch.log1p(constant)) / 2
    rate = torch.where(lead == 0, 0.0, rate)  # −∞ − (−∞) where neither leaves anything
    return Families(leaning, (leaning == 0) & (margin > TIE * size), rate)


class DominatingPair(NamedTuple):
    """The largest eigenvalue of I + H⊗A and how far the others are behind."""

    family: Family  # constant: over-smoothing; varying: no input convergence
    lam: complex
    mu: complex
    gain: float  # |1 + λμ|
    rate: float  # the second largest |1 + λμ| over the largest: how fast X/‖X‖ comes closer to its limit


def dominance(lam: Tensor, mu: Tensor) -> DominatingPair:
    """Which pair (λ, μ) dominates, and which family; neither if they tie. A conjugate pair ties with itself: rate 1."""
    gains, places = pad(layer_eigenvalues(lam, mu).abs().flatten(), (0, 1)).topk(2)  # one alone has a second of 0
    (largest, second), (j, i) = gains.tolist(), divmod(int(places[0]), len(mu))
    lean, rate = float(families(lam, other_eigenvalues(mu)).leaning), second / largest if largest else 1.0
    family: Family = "constant" if lean > 0 else "varying" if lean < 0 else "neither"
    return DominatingPair(family, complex(lam[j]), complex(mu[i]), largest, rate)


def ratio_rate(lam: Tensor, mu: Tensor) -> float:
    """The factor max_{j, μ≠1} |1 + λ_jμ| / max_j |1 + λ_j| by which ‖HFC‖/‖LFC‖ changes per layer in the long run.

    Below 1 the layer over-smooths. Above 1 the ratio grows until it settles on `limit_ratio`. One token gives 1.
    """
    return math.exp(float(families(lam, other_eigenvalues(mu)).log_rate))


def limit(A: Tensor, H: Tensor) -> Tensor:
    """What X/‖X‖ goes to, up to its sign: u vᵀ with the dominating eigenvectors u of A and v of H.

    Dominated by μ = 1 this is 1vᵀ: every token the same. Conjugate pairs and ties have no one limit and are refused.
    """
    (lam, right), (mu, left) = (torch.linalg.eig(require_finite(M, name)) for M, name in ((H, "H"), (A, "A")))
    found = dominance(lam, mu)
    if found.rate > 1 - 1e-9:
        turns = max(abs(found.lam.imag), abs(found.mu.imag)) > 1e-9
        why = "is complex: X/‖X‖ turns in a plane" if turns else "ties with another: X/‖X‖ keeps a mixture of both"
        raise AcutanceError(f"dominating λ = {found.lam:.3g}, μ = {found.mu:.3g} {why}: no one limit, see ratio_rate")
    j, i = int((lam - found.lam).abs().argmin()), int((mu - found.mu).abs().argmin())
    u, v = (vector / vector[vector.abs().argmax()] for vector in (left[:, i], right[:, j]))  # real multiples
    outer = torch.outer(u.real, v.real)
    return outer.div(outer.norm())


def limit_ratio(u: Tensor) -> float:
    """‖HFC‖/‖LFC‖ of the limit u vᵀ, any v: 0 for a constant u, infinite if the entries of u sum to zero."""
    return float(hfc_lfc_frobenius(u[:, None]))


def sharpening_bound(mu_min: float) -> float:
    """−2/(1 + μ_min): for a real λ between this and 0, μ_min beats μ = 1; for λ below it μ = 1 beats μ_min."""
    return -2 / (1 + mu_min) if mu_min > -1 else -math.inf


def layer_smooths(lam: Tensor, mu_min: float) -> bool:
    """Whether max_j |1 + λ_j| > max_j |1 + λ_j μ_min|; exact for real eigenvalues of A, as |1 + λμ| is convex in μ."""
    return bool(families(lam, torch.tensor([mu_min], dtype=torch.float64, device=lam.device)).leaning > 0)


def beats_constant(lam: Tensor, mu: Tensor) -> Tensor:
    """Whether |1 + λμ| > |1 + λ|; for a real μ in (−1, 1) these λ fill the open disc over [−2/(1 + μ), 0]."""
    return torch.as_tensor(growth(lam * mu) > growth(lam))


def beyond_bound(lam: Tensor, mu_min: float, error: float = 0.0) -> Tensor:
    """Where a λ (..., d) without positive real part is so large that μ = 1 beats μ_min: |1 + λ| > |1 + λμ_min|.

    |1 + λμ|² − |1 + λ|² = (μ − 1)(2 Re λ + |λ|²(1 + μ)), so μ_min beats μ = 1 in the open disc over
    [−2/(1 + μ_min), 0]. A complex λ can be outside with a small real part. Ties, and leads within the `error` of λ,
    are left out.
    """
    size = lam.abs().amax(-1, keepdim=True)
    margin = TIE * size + 4 * error * (1 + size)
    lead = growth(lam) - growth(lam * mu_min)
    return torch.as_tensor((lam.real <= TIE * size + error) & (lead > margin))


def furthest_beyond(lam: Tensor, mu_min: float, error: float = 0.0) -> complex | None:
    """Of the λ (d,) `beyond_bound` the one at which μ = 1 is ahead of μ_min the most; None if none is beyond it."""
    beyond = lam[beyond_bound(lam, mu_min, error)]
    lead = growth(beyond) - growth(beyond * mu_min)
    return complex(beyond[lead.argmax()]) if len(beyond) else None


def cannot_smooth(lam: Tensor) -> bool:
    """Whether all λ are real and in [−1, 0]: then |1 + λμ| ≥ 1 − |λ| = |1 + λ| for every |μ| ≤ 1, whatever A is."""
    is_real = not lam.is_complex() or bool(lam.imag.abs().max() <= 1e-9)
    return is_real and bool((lam.real >= -1).all()) and bool((lam.real <= 0).all())


def cosine_floor(ratio: float, tokens: int) -> float:
    """Input convergence implies angle convergence: every pairwise cosine is at least 1 − 2nρ², ρ = ‖HFC‖₂/‖LFC‖₂."""
    return 1 - 2 * tokens * ratio**2 if tokens * ratio**2 <= 1 else -1.0


def singular_ceiling(cosine: float) -> float:
    """Angle convergence implies rank collapse: with all pairwise cosines at least c > 0, σ₂/σ₁ ≤ √(1 − c²)/c."""
    return math.sqrt(1 - min(cosine, 1.0) ** 2) / cosine if cosine > 0 else 1.0


def fold_pre_norm(H: Tensor, weight: Tensor | float) -> Tensor:
    """H diag(γ), with a pre-norm's weights γ folded in; negative ones turn the spectrum round. 1/σ is left out."""
    return H * weight


def pre_norm_power(lam: Tensor, mu: Tensor) -> float:
    """The exponent of depth with which ‖HFC‖/‖LFC‖ falls under Pre-LN, for real λ (the largest positive) and μ.

    λ are those that centred tokens see: `lab.studies.centred_spectrum(H)`. It holds near equal tokens; elsewhere two
    groups of tokens that point opposite ways can persist. The norm makes each layer add tokens of a fixed size, so
    constant tokens along the largest λ grow like depth and another mode (j, i) by 1 + λ_jμ_i/(λ_max·depth) a layer.
    The ratio falls like depth to the power max λ_jμ_i/λ_max − 1 over μ ≠ 1 and the other λ, and not exponentially.
    What lies along the tokens themselves is taken out by the norm: it falls like 1/depth.
    """
    ordered = lam.sort().values
    if ordered[-1] <= 0:
        raise AcutanceError(f"the largest λ is {ordered[-1]:.3g}: constant tokens do not grow under Pre-LN")
    others = torch.outer(ordered[:-1], other_eigenvalues(mu)) / ordered[-1]
    return max(float(others.max()), 0.0) - 1 if others.numel() else -1.0


def format_complex(z: complex) -> str:
    """Short, and real if it is; a real H has the conjugate of every other too."""
    return f"{z.real:.3g}" if abs(z.imag) < 5e-3 * abs(z) else f"{z.real:.3g}±{abs(z.imag):.3g}i"


def rank_correlation(a: Sequence[float] | Series, b: Sequence[float] | Series) -> float:
    """Spearman's: Pearson's correlation of the ranks, ties sharing their mean rank; NaN if either does not vary."""
    ranks = []
    for values in (a, b):
        _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[where])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if np.ptp(ranks, axis=1).all() else math.nan
