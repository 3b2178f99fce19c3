"""What can be proved about a repeated layer with a norm: Pre-LN X + A LN(X) W and Post-LN LN(X + A X W).

LayerNorm centres a token (P x with P = I − 11ᵀ/d), divides it by its size and multiplies it by the weights γ. The
division is a positive factor per token, which changes no direction. With H = Wᵀ, directions follow from P and γ alone:

- Pre-LN sees H diag(γ) on centred tokens; its d − 1 eigenvalues there (`centred_spectrum`) are the λ of
  `spectral_theory.pre_norm_power`, for any H.
- Post-LN multiplies a component with eigenvalue μ of A by G(μ) = P (I + μH) diag(γ) P. Equal tokens stay equal, so
  their direction is a power iteration with G(1) and ends at its dominating eigenvector. Nearly equal tokens approach
  one another at `PostNorm.rate`; tokens that are far apart may not, see `groups_rate`.

All tokens have the same size after Post-LN with equal γ, so input convergence and angle convergence are the same there
(`ratio_at_equal_size`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.errors import AcutanceError, require_finite
from acutance.explain.spectral_theory import other_eigenvalues


def centred_spectrum(H: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """The d − 1 eigenvalues (complex) of P H diag(γ) P on tokens whose channels sum to zero."""
    basis = _centred_basis(H)
    found: Tensor = torch.linalg.eigvals(require_finite(basis.mT @ (H * weight) @ basis, "P H diag(γ) P"))
    return found


@dataclass(frozen=True)
class PostNorm:
    """The limit of equal tokens under Post-LN, and whether nearly equal ones approach it."""

    token: Tensor  # (d,): the limit of all tokens, up to its sign
    gain: float  # the dominating eigenvalue of G(1); if negative, all tokens change their sign at every layer
    rate: float  # the factor per layer of ‖HFC‖/‖LFC‖ near equal tokens; above 1 they move apart


def post_norm(H: Tensor, mu: Tensor, weight: Tensor | float = 1.0) -> PostNorm:
    """The limit and the rate of LN(X + A X W) near equal tokens.

    Let v be the dominating eigenvector of G(1). A small difference between tokens, along the eigenvector of A for μ, is
    multiplied by G(μ), loses its part along v (removed by the division) and is divided by |gain|. So

        rate = max over μ ≠ 1 of the spectral radius of G(μ) across v, over |gain|.

    For equal weights that is max_{j ≠ v, μ ≠ 1} |1 + λ_jμ| / |1 + λ_v| with λ of `centred_spectrum(H)`. The numerator
    leaves out v's own λ. So Post-LN smooths at least as fast as no norm with the same λ, and can smooth with all λ in
    [−1, 0], where a layer without a norm cannot.

    H is Wᵀ (d, d), mu the eigenvalues of A, (N,), μ = 1 among them; weight is γ, one number or (d,).
    """
    basis = _centred_basis(H)

    def gained(value: Tensor | complex) -> Tensor:
        inner = (torch.eye(len(H), dtype=H.dtype, device=H.device) + value * H) * weight
        return basis.mT.to(inner.dtype) @ inner @ basis.to(inner.dtype)

    gains, vectors = torch.linalg.eig(require_finite(gained(1.0), "P (I + H) diag(γ) P"))
    first = int(gains.abs().argmax())
    gain = complex(gains[first])
    if abs(gain.imag) > 1e-9 * abs(gain):
        what = f"the dominating eigenvalue {gain:.3g} of P (I + H) diag(γ) P is complex"
        raise AcutanceError(f"{what}: equal tokens rotate in a plane forever, and there is no limit")
    direction = (vectors[:, first] / vectors[vectors[:, first].abs().argmax(), first]).real
    direction = direction / direction.norm()
    across = _across(direction)
    radii = [_radius(across.mT.to(G.dtype) @ G @ across.to(G.dtype)) for G in map(gained, other_eigenvalues(mu))]
    token = math.sqrt(len(H)) * (basis @ direction) * weight
    return PostNorm(token, gain.real, max(radii) / abs(gain))


def groups_rate(A: Tensor, along: float, others: Tensor, signs: Tensor) -> float:
    """Whether two opposite groups of tokens, x_i = s_i v with s_i = ±1, persist under Post-LN with equal weights.

    v is an eigenvector of P H P with the eigenvalue `along`. The layer gives token i the factor s_i + λ_v (As)_i along
    v, so the groups persist if s_i (s_i + λ_v (As)_i) has one sign for all i. If |λ_v| < 1, that holds for *every*
    choice of signs. A small deviation along another eigenvector is multiplied by D⁻¹(I + λ_j A), where D holds the
    sizes of those factors.

    `along` is λ_v, `others` the other eigenvalues of `centred_spectrum(H)`, and `signs` is s; all +1 are equal tokens.
    Returns the factor per layer of the slowest deviation: below 1 the groups attract nearby tokens, infinite if the
    groups do not persist. They may attract whether or not equal tokens do, so the spectra alone do not decide the
    limit.
    """
    factors = 1 + along * signs * (A @ signs)
    if not ((factors > 0).all() or (factors < 0).all()):
        return math.inf
    complex_A = A.to(torch.complex128)
    eye = torch.eye(len(A), dtype=complex_A.dtype)
    return max(_radius((eye + complex(lam) * complex_A) / factors.abs()[:, None]) for lam in others)


def ratio_at_equal_size(cosine: float, tokens: int) -> float:
    """‖HFC‖_F/‖LFC‖_F of tokens of equal size: √((1 − m)/m), m = (1 + (N − 1)c)/N for a mean cosine c over pairs.

    Input convergence (the ratio → 0) and angle convergence (c → 1) are then the same.
    """
    mean = (1 + (tokens - 1) * cosine) / tokens
    return math.sqrt(max(1 - mean, 0.0) / mean) if mean > 0 else math.inf


def _centred_basis(H: Tensor) -> Tensor:
    """An orthonormal basis (d, d − 1) of the tokens whose channels sum to zero."""
    return _across(torch.ones(len(H), dtype=H.dtype, device=H.device))


def _across(vector: Tensor) -> Tensor:
    """An orthonormal basis (n, n − 1) of the space orthogonal to a vector."""
    basis: Tensor = torch.linalg.svd(vector[None]).Vh[1:].mT
    return basis


def _radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(require_finite(matrix, "the step")).abs().max()) if matrix.numel() else 0.0
