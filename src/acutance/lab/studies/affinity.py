"""How far a square matrix is from symmetric and from positive definite, and what its entries alone would give."""

from __future__ import annotations

import torch
from torch import Tensor


def asymmetry(left: Tensor, right: Tensor) -> Tensor:
    """‖S − Sᵀ‖_F / ‖S + Sᵀ‖_F of S = left @ rightᵀ (..., N, D), in O(N D²): S is never formed.

    ‖S ± Sᵀ‖² = 2‖S‖² ± 2 tr(S S), with ‖S‖² = tr(LᵀL RᵀR) and tr(S S) = tr(RᵀL RᵀL).
    """
    left, right = left.double(), right.double()
    size = ((left.mT @ left) * (right.mT @ right)).sum((-2, -1))
    mixed = right.mT @ left
    turned = (mixed * mixed.mT).sum((-2, -1))
    return ((size - turned).clamp_min(0) / (size + turned).clamp_min(0)).sqrt()


def negative_share(left: Tensor, right: Tensor) -> Tensor:
    """The negative eigenvalues' share in Σ|eigenvalues| of S + Sᵀ, S = left @ rightᵀ (..., N, D), in O(N D²).

    S + Sᵀ = F M Fᵀ with F = [left right] and M swapping the halves; its eigenvalues other than 0 are those of
    G^½ M G^½ with the Gram matrix G = FᵀF, 2D × 2D.
    """
    both = torch.cat([left, right], dim=-1).double()
    values, vectors = torch.linalg.eigh(both.mT @ both)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    swapped = root.roll(left.shape[-1], dims=-2)
    return _negative(torch.linalg.eigvalsh(root @ swapped))


def matrix_asymmetry(S: Tensor) -> Tensor:
    """`asymmetry` of a matrix that is there, (..., N, N)."""
    found: Tensor = torch.linalg.matrix_norm(S - S.mT) / torch.linalg.matrix_norm(S + S.mT)
    return found


def matrix_negative_share(S: Tensor) -> Tensor:
    """`negative_share` of a matrix that is there, (..., N, N)."""
    return _negative(torch.linalg.eigvalsh(S + S.mT))


def permuted(S: Tensor, pairs: Tensor, generator: torch.Generator) -> Tensor:
    """S (samples, heads, N, N) with its entries in random order: what is left of a measure then is chance.

    Args:
        S: the matrices.
        pairs: bool (samples, N, N); the entries marked change places among themselves, the others stay where they are
            (they must all be the same).
        generator: on the CPU. Heads of a sample share their order.
    """
    inside, entries = pairs.flatten(-2), S.flatten(-2)
    noise = torch.rand(inside.shape, generator=generator).to(S.device)
    drawn = (noise + ~inside).argsort(-1)  # the entries inside come first, in random order
    places = (~inside).byte().argsort(dim=-1, stable=True)  # the same in their own order
    drawn, places = (index.unsqueeze(1).expand_as(entries) for index in (drawn, places))
    return torch.empty_like(entries).scatter(-1, places, entries.gather(-1, drawn)).view_as(S)


def _negative(eigenvalues: Tensor) -> Tensor:
    size = eigenvalues.abs()
    # What rounding makes of zeros is no negative mass.
    negative = (eigenvalues < -1e-12 * size.amax(-1, keepdim=True)) * size
    return negative.sum(-1) / size.sum(-1)
