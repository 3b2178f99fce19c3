"""Orthogonal matrices from free ones: four smooth maps Θ ↦ V with VᵀV = I, batched over leading dimensions.

Each map has a preimage: a Θ that it sends to a given orthogonal V, up to the signs of V's columns, which V Λ Vᵀ does
not see. Errors in float32, without TF32, are those of 192×192 matrices in tests/mitigations/test_orthogonal.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The smallest singular value, in units of the bound of the largest, from which `polar` and `cayley` still converge.
SMALLEST_SINGULAR = 1e-3
Number = Callable[[float], float]


def qr(theta: Tensor) -> Tensor:
    """The Q of Θ = QR, with R's diagonal made positive so that Q does not jump where an entry changes sign.

    In float32, V is exact to 5·10⁻⁶ and its gradient to 2·10⁻⁵ at condition numbers of Θ up to 300.
    """
    q, r = torch.linalg.qr(theta)
    negative = r.detach().diagonal(dim1=-2, dim2=-1) < 0
    return q * torch.where(negative, -1.0, 1.0).to(q.dtype).unsqueeze(-2)  # type: ignore[no-any-return]


def polar(theta: Tensor) -> Tensor:
    """The orthogonal matrix closest to Θ, by Newton–Schulz: X ← ½ρ X (3 − ρ² XᵀX), matrix products only.

    The scalings ρ are optimal for the singular values at each step (Chen and Chow 2014); the last, ρ = 1, removes the
    rounding of the others. In float32, V is exact to 10⁻⁵ and its gradient to 10⁻⁴ at condition numbers of Θ up to 300.
    Far beyond, some singular values of V stay below 1: V Λ Vᵀ then has the signs of Λ and no larger eigenvalues.
    """
    x = theta / _spectral_bound(theta.detach())
    for scaling in _POLAR_SCALINGS[theta.dtype]:
        gram = x.mT @ x
        x = 1.5 * scaling * x - (0.5 * scaling**3) * (x @ gram)
    return x


def cayley(theta: Tensor) -> Tensor:
    """(I − S)(I + S)⁻¹ of the skew part S of Θ, which is 2(I + S)⁻¹ − I; matrix products only.

    In float32, V is exact to 3·10⁻⁶ and its gradient to 10⁻⁵ for ‖S‖ up to 300; a new layer has about 20 to 45. Far
    beyond, as in `polar`, singular values of V may stay below 1 but never exceed it.
    """
    identity = torch.eye(theta.shape[-1], dtype=theta.dtype, device=theta.device)
    inverse: Tensor = _Inverse.apply(identity + (theta - theta.mT) / 2)  # type: ignore[no-untyped-call]
    return 2 * inverse - identity


class _Inverse(torch.autograd.Function):
    """A⁻¹ of A = I + S by Newton–Schulz, Z ← ωZ (2 − ωAZ); its gradient −A⁻ᵀ G A⁻ᵀ takes two products more.

    From Z = Aᵀ/b², b a bound of A's singular values, the eigenvalues of AZ are real and in [1/b², 1], as no singular
    value of I + S is below 1; the scalings ω are optimal for them at each step.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        twice = 2 * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        z = a.mT / _spectral_bound(a) ** 2
        for scaling in _INVERSE_SCALINGS[a.dtype]:
            z = scaling * (z @ (twice - scaling * (a @ z)))
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -(inverse.mT @ cotangent @ inverse.mT)


def householder(theta: Tensor) -> Tensor:
    """The product of as many reflections as Θ has columns; their vectors are the columns below a diagonal of ones.

    With Y holding the vectors, the product is I − Y T Yᵀ, where T⁻¹ is the upper triangle of YᵀY with its diagonal
    halved (the UT transform): one triangular solve instead of a reflection at a time, forwards and backwards.
    In float32, V and its gradient are exact to 2·10⁻⁶ at condition numbers of T up to 300.
    """
    identity = torch.eye(theta.shape[-1], dtype=theta.dtype, device=theta.device)
    vectors = theta.tril(-1) + identity
    gram = vectors.mT @ vectors
    half: Tensor = torch.linalg.solve_triangular(gram.triu() - identity * gram / 2, vectors.mT, upper=True)
    return identity - vectors @ half


def _spectral_bound(theta: Tensor) -> Tensor:
    """‖(ΘᵀΘ)²‖_F^¼: at least the largest singular value of Θ, and at most d^⅛ times it."""
    gram = theta.mT @ theta
    norm: Tensor = torch.linalg.matrix_norm(gram @ gram, keepdim=True)
    return norm.pow(0.25)


def _scalings(low: float, best: Number, image: Number) -> dict[torch.dtype, list[float]]:
    """A scaling for every step x ↦ image(scaling · x), until all of [low, 1] is 1 to a dtype's precision.

    The `best` one for an interval [low, 1] makes its image the narrowest, which again ends at 1.
    """
    made: dict[torch.dtype, list[float]] = {}
    for dtype in (torch.float32, torch.float64):
        x, steps = low, made.setdefault(dtype, [])
        while 1 - x > torch.finfo(dtype).eps:
            steps.append(best(x))
            x = image(steps[-1] * x)
        steps.append(1.0)
    return made


# Of the singular values of X in ½ρ X (3 − ρ² XᵀX), and of the eigenvalues of AZ in ωZ (2 − ωAZ).
_POLAR_SCALINGS = _scalings(SMALLEST_SINGULAR, lambda x: (3 / (1 + x + x**2)) ** 0.5, lambda x: x * (3 - x**2) / 2)
_INVERSE_SCALINGS = _scalings(SMALLEST_SINGULAR**2, lambda x: 2 / (1 + x), lambda x: x * (2 - x))


def _cayley_preimage(v: Tensor) -> Tensor:
    """The skew S with (I − S)(I + S)⁻¹ = V D, the signs D chosen so that I + V D is far from singular.

    I + V D = (D + V) D, and eliminating D + V from the top, the sign of each pivot's own entry can be matched
    when the pivot is reached: no pivot is then smaller than 1.
    """
    rest, signs = v.clone(), torch.ones(len(v), dtype=v.dtype)
    for k in range(len(v)):
        signs[k] = -1.0 if rest[k, k] < 0 else 1.0
        pivot = rest[k, k] + signs[k]
        rest[k + 1 :, k + 1 :] -= torch.outer(rest[k + 1 :, k], rest[k, k + 1 :] / pivot)
    identity = torch.eye(len(v), dtype=v.dtype)
    s: Tensor = torch.linalg.solve(identity + v * signs, identity - v * signs)
    return (s - s.mT) / 2


class Basis(NamedTuple):
    """A map from free to orthogonal matrices, and a way back for one matrix."""

    map: Callable[[Tensor], Tensor]
    preimage: Callable[[Tensor], Tensor] = lambda v: v


BASES = {
    "qr": Basis(qr),
    "polar": Basis(polar),
    "cayley": Basis(cayley, _cayley_preimage),
    # LAPACK's reflectors of V = QR: R is diagonal with entries ±1, so Q is V up to signs.
    "householder": Basis(householder, lambda v: torch.geqrf(v)[0].tril(-1)),
}
