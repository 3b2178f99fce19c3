"""How exact V and its gradient are in float32, for every basis of Eigen and for some ways not in the package.

    python benchmarks/orthogonal_precision.py

Twelve 192×192 matrices Θ a seed, rounded to float32. At the start they are what a new layer has: the eigenvectors of
a random symmetric matrix, through the preimage of the basis. For what training may make of them, random noise is added
until the matrix that the basis divides by (Θ itself for qr and polar, the triangle T⁻¹ for householder) has a given
condition number; numbers below the start's are left out. For cayley it is the norm of the skew part S that counts:
noise as large as the start is added and S scaled to the same numbers, and to 1/2, where iterations are easy.

V is compared with float64 (SVD for polar, LAPACK's LU for cayley and reflectors for householder, the same map for qr),
the gradient of <G, V> for a random G with float64's (polar: the closed form in the eigenbasis of its symmetric factor).
Errors are relative Frobenius norms, orthogonality is ‖VᵀV − I‖_F / √d; the worst and the median over all matrices
and seeds. Products are counted as they run, a batch as one, those in bfloat16 by themselves. Results go to
benchmarks/results, one CSV per device and versions.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.mitigations import orthogonal

CONDITIONS = (3, 30, 300)
SMALL = 0.5  # a norm of S at which Cayley's fixed point is quick
FIXED_POINT_STEPS = 24
TOLERANCE = 1e-7  # of the residual at which conjugate gradients stop, relative to the right-hand side
LARGEST_NOISE = 1e4

Map = Callable[[Tensor], Tensor]
Solver = Callable[[Tensor, Tensor], Tensor]


# --- Θ, as at the start and as after training


def start(basis: str, batch: int, dim: int, generator: torch.Generator) -> Tensor:
    """Θ of new layers, as `Eigen` chooses it."""
    free = torch.randn(batch, dim, dim, dtype=torch.float64, generator=generator)
    eigenvectors = torch.linalg.eigh(free + free.mT).eigenvectors
    return torch.stack([orthogonal.BASES[basis].preimage(v) for v in eigenvectors])


def divided_by(basis: str, theta: Tensor) -> Tensor:
    """The matrix whose condition number says how hard the basis is."""
    identity = torch.eye(theta.shape[-1], dtype=theta.dtype)
    if basis == "cayley":
        return identity + (theta - theta.mT) / 2
    if basis == "householder":
        vectors = theta.tril(-1) + identity
        gram = vectors.mT @ vectors
        return gram.triu() - identity * gram / 2
    return theta


def condition_of(basis: str, theta: Tensor) -> Tensor:
    return torch.linalg.cond(divided_by(basis, theta))


def noisy(basis: str, theta: Tensor, condition: float, generator: torch.Generator) -> Tensor | None:
    """Θ with as much noise as brings every condition number to the one given; None if one is there already."""
    if (condition_of(basis, theta) >= condition).any():
        return None
    noise = torch.randn(theta.shape, dtype=theta.dtype, generator=generator) / theta.shape[-1] ** 0.5
    low, high = torch.zeros(len(theta), 1, 1, dtype=theta.dtype), torch.full((len(theta), 1, 1), 0.1).to(theta)
    while (short := condition_of(basis, theta + high * noise) < condition).any():
        high = torch.where(short[:, None, None], 1.1 * high, high)
        if high.max() > LARGEST_NOISE:
            raise RuntimeError(f"{basis}: no noise gives the condition number {condition}; try other seeds")
    for _ in range(10):
        middle = (low + high) / 2
        short = (condition_of(basis, theta + middle * noise) < condition)[:, None, None]
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return theta + high * noise


def of_norm(theta: Tensor, norm: float, generator: torch.Generator) -> Tensor:
    """A noisy skew matrix of this spectral norm."""
    noisy = theta + theta.std() * torch.randn(theta.shape, dtype=theta.dtype, generator=generator)
    skew = (noisy - noisy.mT) / 2
    return skew * (norm / torch.linalg.matrix_norm(skew, ord=2, keepdim=True))


def states(basis: str, arguments: argparse.Namespace, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Every Θ with its name, in float64 but exact in float32."""
    theta = start(basis, arguments.batch, arguments.dim, generator)
    yield "start", theta.float().double()
    if basis == "cayley":
        for norm in (SMALL, *arguments.conditions):
            yield f"norm {norm:g}", of_norm(theta, norm, generator).float().double()
        return
    for condition in arguments.conditions:
        trained = noisy(basis, theta, condition, generator)
        if trained is not None:
            yield f"condition {condition:g}", trained.float().double()


# --- float64: what everything is compared with


def exact_polar(theta: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(theta)
    return u @ vh


def exact_polar_gradient(theta: Tensor, cotangent: Tensor) -> Tensor:
    """V K with P K + K P = VᵀG − GᵀV and Θ = V P, solved in the eigenbasis of P."""
    v = exact_polar(theta)
    p = v.mT @ theta
    s, e = torch.linalg.eigh((p + p.mT) / 2)
    skew = v.mT @ cotangent - cotangent.mT @ v
    return v @ e @ ((e.mT @ skew @ e) / (s.unsqueeze(-1) + s.unsqueeze(-2))) @ e.mT


def lapack_householder(theta: Tensor) -> Tensor:
    vectors = theta.tril(-1) + torch.eye(theta.shape[-1], dtype=theta.dtype)
    made: Tensor = torch.linalg.householder_product(vectors, 2 / vectors.square().sum(-2))
    return made


def reference(basis: str, theta: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """V and the gradient in float64."""
    if basis == "polar":
        return exact_polar(theta), exact_polar_gradient(theta, cotangent)
    way = cayley_by_elimination if basis == "cayley" else orthogonal.BASES[basis].map
    v, gradient = value_and_gradient(way, theta, cotangent)
    return (lapack_householder(theta) if basis == "householder" else v), gradient


# --- Polar, other ways


def newton_schulz(x: Tensor, factors: Sequence[float], gram_of: Map = lambda x: x.mT @ x) -> Tensor:
    for scaling in factors:
        x = 1.5 * scaling * x - (0.5 * scaling**3) * (x @ gram_of(x))
    return x


def scalings(low: float, precision: float, *, scaled: bool) -> list[float]:
    """Until all of [low, 1] is 1 to this precision. Unscaled needs more steps, but sends nothing near 1 far away."""
    found = []
    while 1 - low > precision:
        found.append((3 / (1 + low + low**2)) ** 0.5 if scaled else 1.0)
        low = 0.5 * found[-1] * low * (3 - (found[-1] * low) ** 2)
    return found


BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps
SCALED, UNSCALED = (scalings(orthogonal.SMALLEST_SINGULAR, BFLOAT16_EPS, scaled=each) for each in (True, False))


def polar_in_bfloat16(theta: Tensor, *, scalings: Sequence[float], finish: int) -> Tensor:
    """Steps whose products are in bfloat16, their sums in float32; then unscaled ones that are float32 throughout."""
    x = theta / orthogonal._spectral_bound(theta.detach())
    for scaling in scalings:
        narrow = x.bfloat16()
        x = 1.5 * scaling * x - (0.5 * scaling**3) * (narrow @ (narrow.mT @ narrow)).float()
    return newton_schulz(x, [1.0] * finish)


class Gram(torch.autograd.Function):
    """XᵀX, whose gradient X (G + Gᵀ) is one product where autograd takes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.mT @ x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x @ (cotangent + cotangent.mT)


def polar_with_symmetric_gram(theta: Tensor) -> Tensor:
    x = theta / orthogonal._spectral_bound(theta.detach())
    return newton_schulz(x, orthogonal._POLAR_SCALINGS[theta.dtype], Gram.apply)


class SolvedPolar(torch.autograd.Function):
    """V by any way, and its gradient by the equation that defines it instead of through the steps."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, find: Map, solve: Solver) -> Tensor:
        v = find(theta)
        ctx.save_for_backward(theta, v)
        ctx.solve = solve
        return v

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        theta, v = ctx.saved_tensors
        p, projected = v.mT @ theta, v.mT @ cotangent
        return v @ ctx.solve((p + p.mT) / 2, projected - projected.mT), None, None


def sylvester_by_newton_schulz(p: Tensor, skew: Tensor) -> Tensor:
    """K of P K + K P = C: the sign of [[P, C], [0, −P]] is [[I, 2K], [0, −I]], and only its upper blocks are kept."""
    bound = orthogonal._spectral_bound(p)
    a, c = p / bound, skew / bound
    for scaling in orthogonal._POLAR_SCALINGS[p.dtype]:
        square, once = a @ a, a @ c
        twice = a @ once  # A²C, and as C is skew CA² = −(A²C)ᵀ
        cubic = twice - once @ a - twice.mT
        a, c = (1.5 * scaling * old - (0.5 * scaling**3) * new for old, new in ((a, a @ square), (c, cubic)))
    return c / 2


def sylvester_by_conjugate_gradients(p: Tensor, skew: Tensor) -> Tensor:
    """The same K; K ↦ P K + K P is positive definite, and on skew K it is P K − (P K)ᵀ: one product."""

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-2, -1), keepdim=True)

    k, residual, direction = torch.zeros_like(skew), skew, skew
    size = wanted = inner(residual, residual)
    while (size > TOLERANCE**2 * wanted).any():
        half = p @ direction
        image = half - half.mT
        step = size / inner(direction, image)
        k, residual = k + step * direction, residual - step * image
        before, size = size, inner(residual, residual)
        direction = residual + (size / before) * direction
    return k


# --- Cayley by iterations


def skew_part(theta: Tensor) -> tuple[Tensor, Tensor]:
    return torch.eye(theta.shape[-1], dtype=theta.dtype), (theta - theta.mT) / 2


def cayley_by_fixed_point(theta: Tensor) -> Tensor:
    """V ← I − S − V S, which contracts only where ‖S‖ < 1."""
    identity, s = skew_part(theta)
    v = identity - s
    for _ in range(FIXED_POINT_STEPS):
        v = identity - s - v @ s
    return v


def cayley_by(invert: Map) -> Map:
    """2(I + S)⁻¹ − I by any inverse."""

    def made(theta: Tensor) -> Tensor:
        identity, s = skew_part(theta)
        return 2 * invert(identity + s) - identity

    return made


def eliminated(matrix: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.inv_ex(matrix).inverse
    return inverse


cayley_by_elimination = cayley_by(eliminated)


def inverse_in_bfloat16(matrix: Tensor, *, finish: int) -> Tensor:
    """Newton–Schulz in bfloat16 with as many steps as the worst matrix needs, then unscaled ones in float32.

    The package's scalings, made for any bound up to 1000, send eigenvalues near 1 to ones that bfloat16 loses; here
    they are made for each matrix. As every step starts from the matrix again, the last ones take away the rounding of
    the first, if that was not too large.
    """
    narrow, twice = matrix.bfloat16(), 2 * torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    low = orthogonal._spectral_bound(matrix) ** -2
    z = matrix.mT * low
    while (1 - low > BFLOAT16_EPS).any():
        scaling, rounded = 2 / (1 + low), z.bfloat16()
        z = scaling * (rounded @ (twice - scaling * (narrow @ rounded)).bfloat16())
        low = scaling * low * (2 - scaling * low)
    for _ in range(finish):
        z = z @ (twice - matrix @ z)
    return z


class InverseInBfloat16(orthogonal._Inverse):
    """The package's gradient of an inverse that is made in another way."""

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        return inverse_in_bfloat16(matrix, finish=4)


# --- Measuring


@dataclass(frozen=True)
class Variant:
    """A way to make V, and the basis that it is a way to make."""

    name: str
    basis: str
    map: Map


def solved(find: Map, solve: Solver) -> Map:
    return lambda theta: SolvedPolar.apply(theta, find, solve)


def bfloat16(scalings: Sequence[float], finish: int) -> Map:
    return partial(polar_in_bfloat16, scalings=scalings, finish=finish)


VARIANTS = [
    *(Variant(name, name, basis.map) for name, basis in orthogonal.BASES.items()),
    Variant("polar, XᵀX with its own gradient", "polar", polar_with_symmetric_gram),
    Variant("polar, Sylvester by Newton–Schulz", "polar", solved(orthogonal.polar, sylvester_by_newton_schulz)),
    Variant("polar, Sylvester by CG", "polar", solved(orthogonal.polar, sylvester_by_conjugate_gradients)),
    *(Variant(f"polar, bfloat16 scaled + {n} float32", "polar", bfloat16(SCALED, n)) for n in (1, 2, 3)),
    *(Variant(f"polar, bfloat16 unscaled + {n} float32", "polar", bfloat16(UNSCALED, n)) for n in (1, 2, 3)),
    Variant(
        "polar, bfloat16 + 2, Sylvester by N–S", "polar", solved(bfloat16(UNSCALED, 2), sylvester_by_newton_schulz)
    ),
    Variant(
        "polar, bfloat16 + 2, Sylvester by CG", "polar", solved(bfloat16(UNSCALED, 2), sylvester_by_conjugate_gradients)
    ),
    Variant("cayley, fixed point", "cayley", cayley_by_fixed_point),
    Variant("cayley, LU inverse", "cayley", cayley_by_elimination),
    Variant("cayley, bfloat16 + 4 float32", "cayley", cayley_by(InverseInBfloat16.apply)),
]


class Products(TorchDispatchMode):
    """Counts matrix products, and what libraries do that is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.counted["bfloat16" if args[0].dtype == torch.bfloat16 else "products"] += 1
        elif name in ("linalg_qr", "linalg_inv_ex", "linalg_solve_triangular"):
            self.counted["library"] += 1
        return func(*args, **(kwargs or {}))


def value_and_gradient(way: Map, theta: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    theta = theta.clone().requires_grad_()
    v = way(theta)
    (gradient,) = torch.autograd.grad(v, theta, cotangent)
    return v.detach(), gradient


def counts(way: Map, theta: Tensor, cotangent: Tensor) -> Row:
    theta = theta.clone().requires_grad_()
    with Products() as forward:
        v = way(theta)
    with Products() as backward:
        torch.autograd.grad(v, theta, cotangent)
    return {
        f"{kind}_{direction}": mode.counted[kind]
        for direction, mode in (("forward", forward), ("backward", backward))
        for kind in ("products", "bfloat16", "library")
    }


def relative(found: Tensor, exact: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(found.double() - exact) / torch.linalg.matrix_norm(exact)


def errors(way: Map, theta: Tensor, cotangent: Tensor, exact: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """For every matrix: how far float32 is from float64."""
    v, gradient = value_and_gradient(way, theta.float(), cotangent.float())
    identity, wide = torch.eye(v.shape[-1], dtype=torch.float64), v.double()
    return {
        "value": relative(v, exact[0]),
        "orthogonality": torch.linalg.matrix_norm(wide.mT @ wide - identity) / v.shape[-1] ** 0.5,
        "gradient": relative(gradient, exact[1]),
    }


def benchmark(arguments: argparse.Namespace) -> list[Row]:
    """A row for every variant and state, over all matrices and seeds."""
    found: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
    most: dict[tuple[str, str], Row] = {}
    for seed in range(arguments.seeds):
        for basis in orthogonal.BASES:
            generator = torch.Generator().manual_seed(seed)
            for state, theta in states(basis, arguments, generator):
                cotangent = torch.randn(theta.shape, generator=generator).double()
                exact = reference(basis, theta, cotangent)
                condition = condition_of(basis, theta)
                for variant in (variant for variant in VARIANTS if variant.basis == basis):
                    key = variant.name, state
                    measured = errors(variant.map, theta, cotangent, exact)
                    found.setdefault(key, []).append({"condition": condition, **measured})
                    counted = counts(variant.map, theta.float(), cotangent.float())
                    most[key] = {name: max(n, most.get(key, counted)[name]) for name, n in counted.items()}
    return [summary(*key, of_seeds) | most[key] for key, of_seeds in found.items()]


def summary(variant: str, state: str, of_seeds: list[dict[str, Tensor]]) -> Row:
    joined = {name: torch.cat([of_seed[name] for of_seed in of_seeds]) for name in of_seeds[0]}
    row: Row = {"variant": variant, "state": state, "matrices": len(joined["value"])}
    for name, values in joined.items():
        # what has overflowed is no number, and worse than any
        ordered = values.nan_to_num(nan=torch.inf, posinf=torch.inf).sort().values
        row[f"{name}_worst"], row[f"{name}_median"] = (f"{ordered[i].item():.3g}" for i in (-1, len(ordered) // 2))
    return row


def main() -> None:
    parser = results.script_parser(__doc__, device=False)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--conditions", type=float, nargs="*", default=CONDITIONS)
    arguments = parser.parse_args()
    rows = benchmark(arguments)
    worst = (f"{name}_worst" for name in ("condition", "value", "orthogonality", "gradient"))
    counted = (f"{kind}_{way}" for way in ("forward", "backward") for kind in ("bfloat16", "products", "library"))
    results.show(rows, "variant", "state", *worst, *counted)
    shared = {"dim": arguments.dim, "batch": arguments.batch, "seeds": arguments.seeds}
    where = arguments.results, "cpu", "float32"
    print(results.script_rows("orthogonal_precision", rows, *where, toy=False, **shared), file=sys.stderr)


if __name__ == "__main__":
    main()
