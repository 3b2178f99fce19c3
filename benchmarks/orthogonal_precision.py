"""How exact V and its gradient are in float32, for every basis of Eigen.

    python benchmarks/orthogonal_precision.py

Twelve 192×192 matrices Θ a seed, rounded to float32. At the start they are what a new layer has: the eigenvectors of
a random symmetric matrix, through the preimage of the basis. For what training may make of them, random noise is added
until the matrix that the basis divides by (Θ itself for qr and polar, the triangle T⁻¹ for householder) has a given
condition number; numbers below the start's are left out. For cayley it is the norm of the skew part S that counts:
noise as large as the start is added and S scaled to the same numbers, and to 1/2, where iterations are easy.

V is compared with float64 (SVD for polar, LAPACK's LU for cayley and reflectors for householder, the same map for qr),
the gradient of <G, V> for a random G with float64's (polar: the closed form in the eigenbasis of its symmetric factor).
Errors are relative Frobenius norms, orthogonality is ‖VᵀV − I‖_F / √d; the worst and the median over all matrices
and seeds. Products are counted as they run, a batch as one. Results go to benchmarks/results, one CSV per versions.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.mitigations import orthogonal

CONDITIONS = (3, 30, 300)
SMALL = 0.5  # a norm of S at which Cayley's iteration is quick
LARGEST_NOISE = 1e4
LIBRARY = ("linalg_qr", "linalg_inv_ex", "linalg_solve_triangular")

Map = Callable[[Tensor], Tensor]


def start(basis: str, batch: int, dim: int, generator: torch.Generator) -> Tensor:
    """Θ of new layers, as `Eigen` chooses it."""
    free = torch.randn(batch, dim, dim, dtype=torch.float64, generator=generator)
    eigenvectors = torch.linalg.eigh(free + free.mT).eigenvectors
    return torch.stack([orthogonal.BASES[basis].preimage(v) for v in eigenvectors])


def condition_of(basis: str, theta: Tensor) -> Tensor:
    """The condition number of what the basis divides by, which says how hard it is."""
    identity, divided_by = torch.eye(theta.shape[-1], dtype=theta.dtype), theta
    if basis == "cayley":
        divided_by = identity + (theta - theta.mT) / 2
    if basis == "householder":
        vectors = theta.tril(-1) + identity
        gram = vectors.mT @ vectors
        divided_by = gram.triu() - identity * gram / 2
    return torch.linalg.cond(divided_by)


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


def reference(basis: str, theta: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """V and the gradient in float64."""
    if basis == "polar":  # V K with P K + K P = VᵀG − GᵀV and Θ = V P, solved in the eigenbasis of P
        u, _, vh = torch.linalg.svd(theta)
        v = u @ vh
        p, projected = v.mT @ theta, v.mT @ cotangent
        s, e = torch.linalg.eigh((p + p.mT) / 2)
        skew = projected - projected.mT
        return v, v @ e @ ((e.mT @ skew @ e) / (s.unsqueeze(-1) + s.unsqueeze(-2))) @ e.mT
    identity = torch.eye(theta.shape[-1], dtype=theta.dtype)

    def eliminated(theta: Tensor) -> Tensor:
        return 2 * torch.linalg.inv(identity + (theta - theta.mT) / 2) - identity

    way = eliminated if basis == "cayley" else orthogonal.BASES[basis].map
    v, gradient = value_and_gradient(way, theta, cotangent)
    if basis == "householder":
        vectors = theta.tril(-1) + identity
        v = torch.linalg.householder_product(vectors, 2 / vectors.square().sum(-2))
    return v, gradient


class Products(TorchDispatchMode):
    """Counts matrix products, and what libraries do that is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counted["products"] += name in ("mm", "bmm")
        self.counted["library"] += name in LIBRARY
        return func(*args, **(kwargs or {}))


def value_and_gradient(way: Map, theta: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    theta = theta.clone().requires_grad_()
    v = way(theta)
    (gradient,) = torch.autograd.grad(v, theta, cotangent)
    return v.detach(), gradient


def counts(way: Map, theta: Tensor) -> Row:
    theta = theta.clone().requires_grad_()
    with Products() as forward:
        v = way(theta)
    with Products() as backward:
        torch.autograd.grad(v.sum(), theta)
    both = {"forward": forward.counted, "backward": backward.counted}
    return {f"{kind}_{way}": found[kind] for way, found in both.items() for kind in ("products", "library")}


def relative(found: Tensor, exact: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(found.double() - exact) / torch.linalg.matrix_norm(exact)


def errors(basis: str, theta: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """For every matrix: how far float32 is from float64."""
    exact_v, exact_gradient = reference(basis, theta, cotangent)
    v, gradient = value_and_gradient(orthogonal.BASES[basis].map, theta.float(), cotangent.float())
    identity, wide = torch.eye(v.shape[-1], dtype=torch.float64), v.double()
    return {
        "condition": condition_of(basis, theta),
        "value": relative(v, exact_v),
        "orthogonality": torch.linalg.matrix_norm(wide.mT @ wide - identity) / v.shape[-1] ** 0.5,
        "gradient": relative(gradient, exact_gradient),
    }


def benchmark(arguments: argparse.Namespace) -> list[Row]:
    """A row for every basis and state, over all matrices and seeds."""
    found: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
    counted: dict[tuple[str, str], Row] = {}
    for seed in range(arguments.seeds):
        for basis in orthogonal.BASES:
            generator = torch.Generator().manual_seed(seed)
            for state, theta in states(basis, arguments, generator):
                cotangent = torch.randn(theta.shape, generator=generator).double()
                found.setdefault((basis, state), []).append(errors(basis, theta, cotangent))
                counted[basis, state] = counts(orthogonal.BASES[basis].map, theta.float())
    return [summary(*key, of_seeds) | counted[key] for key, of_seeds in found.items()]


def summary(basis: str, state: str, of_seeds: list[dict[str, Tensor]]) -> Row:
    joined = {name: torch.cat([of_seed[name] for of_seed in of_seeds]) for name in of_seeds[0]}
    row: Row = {"variant": basis, "state": state, "matrices": len(joined["value"])}
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
    results.show(rows, "variant", "state", *worst, *counts(orthogonal.qr, torch.eye(2)))
    shared = {name: getattr(arguments, name) for name in ("dim", "batch", "seeds")}
    print(results.script_rows("orthogonal_precision", rows, arguments.results, "cpu", "float32", toy=False, **shared))


if __name__ == "__main__":
    main()
