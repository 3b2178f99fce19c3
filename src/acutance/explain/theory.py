"""The theory of NeuTRENO as executable statements (https://arxiv.org/abs/2312.00751).

Theorem 1: self-attention is one gradient step on a functional whose minimisers are constant.
Lemma 1: attention repeated is the expectation of a random walk. Lemma 2: that walk forgets where it started.
Proposition 1: pulled back towards a signal f, the walk no longer forgets.

`A` is an `AttentionOperator` or any row-stochastic tensor (..., N, N); values are (..., N, C).
"""

import math

import torch
from torch import Tensor

from acutance.attention.operator import AttentionOperator
from acutance.attention.products import accumulation_dtype
from acutance.attention.spectra import DENSE_TOKENS, solve_stationary
from acutance.errors import AcutanceError, require_finite

Attention = AttentionOperator | Tensor

_BOUNDARY = 1e-6  # within this of 1 a spectral radius counts as 1: μ₁ = 1 is only ever computed up to rounding
_MOST_PRODUCTS = 10_000


def affinity(k: Tensor, scale: float | None = None) -> Tensor:
    """The kernel of symmetric attention before it is normalised, K_ij = exp(s kᵢ·kⱼ), s = 1/√D by default."""
    return torch.exp(k @ k.mT * (k.shape[-1] ** -0.5 if scale is None else scale))


def nonlocal_functional(u: Tensor, kernel: Tensor) -> Tensor:
    """J(u) = ½ Σᵢⱼ k_ij ‖uᵢ − uⱼ‖² for u (..., N, C) and an explicit kernel (..., N, N)."""
    differences = u.unsqueeze(-2) - u.unsqueeze(-3)
    return 0.5 * (kernel * differences.square().sum(-1)).sum((-2, -1))


def euler_step(v: Tensor, kernel: Tensor) -> Tensor:
    """Theorem 1: v − Δt ∇J(v) with Δtᵢ = 1 / Σⱼ (k_ij + k_ji); symmetric attention if k + kᵀ ∝ `affinity(keys)`."""
    with torch.enable_grad():
        u = v.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(nonlocal_functional(u, kernel).sum(), u)
    step = 1 / (kernel + kernel.mT).sum(-1, keepdim=True)
    return v - step * gradient


def walk_expectation(A: Attention, v: Tensor, steps: int) -> Tensor:
    """Lemma 1: Aᵏv, where row i is the mean of the values met by walks of `steps` steps from token i."""
    return fidelity_iterate(A, v, 0.0, steps)


def simulate_walks(
    A: Attention, v: Tensor, start: int, steps: int, walks: int, generator: torch.Generator | None = None
) -> Tensor:
    """Lemma 1 by throwing dice: the values (..., walks, C) where that many walks from token `start` end."""
    transition = A if isinstance(A, Tensor) else A.dense()
    position = transition.new_full((*transition.shape[:-2], walks), start, dtype=torch.long)
    for _ in range(steps):
        odds = torch.take_along_dim(transition, position.unsqueeze(-1), dim=-2)
        position = torch.multinomial(odds.flatten(0, -2), 1, generator=generator).view_as(position)
    return torch.take_along_dim(v, position.unsqueeze(-1), dim=-2)


def degree_distribution(k: Tensor, scale: float | None = None) -> Tensor:
    """Lemma 2, symmetric case: πᵢ = dᵢ / Σⱼ dⱼ with dᵢ = Σⱼ exp(s kᵢ·kⱼ)."""
    degrees = affinity(k, scale).sum(-1)
    return degrees / degrees.sum(-1, keepdim=True)


def smoothing_limit(A: Attention, v: Tensor) -> Tensor:
    """Lemma 2: the limit of Aᵏv, Σⱼ πⱼ vⱼ in every row, with π the stationary distribution of A."""
    pi = A.stationary() if isinstance(A, AttentionOperator) else solve_stationary(A)
    return (pi.unsqueeze(-2) @ v).expand(v.shape)


def smoothing_rate(A: Attention) -> Tensor:
    """The factor |μ₂| by which, step after step, Aᵏv comes closer to its limit."""
    return _eigenvalues(A).abs().sort(-1).values[..., -2]


def fidelity_iterate(A: Attention, f: Tensor, strength: float, steps: int, start: Tensor | None = None) -> Tensor:
    """Proposition 1: u ← Au + λ̃(f − u), repeated from `start` (f by default)."""
    u = f if start is None else start
    for _ in range(steps):
        u = A @ u + strength * (f - u)
    return u


def fidelity_rate(A: Attention, strength: float) -> Tensor:
    """max |μᵢ − λ̃|, the spectral radius of A − λ̃I: below 1 the iteration forgets where it started."""
    return (_eigenvalues(A) - strength).abs().amax(-1)


def fidelity_converges(A: Attention, strength: float) -> Tensor:
    """Whether u ← Au + λ̃(f − u) converges from every start: |μᵢ − λ̃| < 1 for all μᵢ; not at the boundary λ̃ = 0."""
    return fidelity_rate(A, strength) < 1 - _BOUNDARY


def fidelity_limit(A: Attention, f: Tensor, strength: float) -> Tensor:
    """The fixed point λ̃((1 + λ̃)I − A)⁻¹f of u = Au + λ̃(f − u); it is constant over tokens only if f is.

    Solved from the matrix up to 512 tokens, above by at most 10,000 products with A; a small strength needs many.
    """
    if not strength > 0:
        raise AcutanceError(f"fidelity_limit needs a strength above 0, got {strength}; see smoothing_limit for 0")
    if (tokens := A.shape[-1]) <= DENSE_TOKENS:
        matrix = require_finite(A if isinstance(A, Tensor) else A.dense(), "A")
        dtype = accumulation_dtype(matrix, f)
        system = (1 + strength) * torch.eye(tokens, dtype=dtype, device=matrix.device) - matrix.to(dtype)
        limit: Tensor = torch.linalg.lu_solve(*torch.linalg.lu_factor(system), strength * f.to(dtype))
        return limit.to(torch.promote_types(A.dtype, f.dtype))
    # The rows of A sum to one, so every step u ← (Au + λ̃f) / (1 + λ̃) shrinks the largest error by 1/(1 + λ̃),
    # also where the plain iteration diverges.
    digits = -math.log(torch.finfo(f.dtype).eps)
    products = digits / math.log1p(strength)
    if products > _MOST_PRODUCTS:
        enough = 1.1 * math.expm1(digits / _MOST_PRODUCTS)  # a little more, so that it is enough as printed too
        advice = f"give a strength of {enough:.1e} or more, or at most {DENSE_TOKENS} tokens"
        raise AcutanceError(f"{tokens} tokens at strength {strength:g} need {products:.1e} products with A; {advice}")
    u = f
    for _ in range(math.ceil(products)):
        u = (A @ u + strength * f) / (1 + strength)
    return u


def _eigenvalues(A: Attention) -> Tensor:
    return torch.linalg.eigvals(require_finite(A, "A")) if isinstance(A, Tensor) else A.eigenvalues()
