"""The true dominating eigenvalue of a layer with several heads, I + Σ_h H_h⊗A_h, for given attention.

Its spectrum is not made of those of its parts: counting by |1 + λμ| with λ from the whole H and μ from each A_h is
exact for one head or equal A_h, and a heuristic otherwise. Here it is computed, from products alone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.errors import AcutanceWarning
from acutance.explain.quotient import Quotient
from acutance.explain.weights import Branch, Norm, branch, layer_spectrum
from acutance.kernels import krylov
from acutance.operator import AttentionOperator
from acutance.sites import AttentionSite
from acutance.spectral_theory import FAMILIES, Families, Family, growth

TOLERANCE = 1e-6  # of a residual, as a share of the largest |λ| of H


@dataclass(frozen=True, eq=False)
class LayerMode:
    """The largest eigenvalues of one layer by modulus, among constant tokens and among all others."""

    constant: complex  # of I + H, which is what the layer does to constant tokens
    varying: NDArray[np.complex128]  # (batch,): of what it does to tokens up to a constant
    residual: float  # the largest of the varying ones'
    families: Families  # (batch,)

    @property
    def family(self) -> list[Family]:
        """Which one dominates, sample by sample: constant smooths, varying does not."""
        return [FAMILIES[int(lean)] for lean in self.families.leaning]


@torch.no_grad()
def layer_mode(site: AttentionSite, A: AttentionOperator, *, norm: Norm = "fold") -> LayerMode:
    """The dominating eigenvalue of I + Σ_h H_h⊗A_h for each sample, by Arnoldi iteration on X ↦ Σ_h A_h X W_h.

    Constant tokens stay constant, so the spectrum is that of I + H together with that of the layer on tokens up to a
    constant; only the latter needs iterating. No matrix of tokens · dim rows is made. It takes some hundred products
    with A: a check of `explain`'s count for a few samples, not a replacement.

    Args:
        site: the layer's weights.
        A: its attention, e.g. `record.operator` of what `site.observe` hands over; without padding.
        norm: whether the pre-norm's weight is folded into H, as in `explain`.
    """
    spectrum = layer_spectrum(site, norm)
    lam = spectrum.deciding
    assert lam is not None, "the whole H is found by default"
    largest = complex(lam[np.abs(1 + lam).argmax()])
    size = float(np.abs(lam).max())
    found = _varying(branch(site, norm), A, TOLERANCE * size)
    values = torch.full((A.shape[0],), largest, dtype=torch.complex128) if found is None else found.values[:, 0].cpu()
    constant = growth(torch.tensor(largest, dtype=torch.complex128)).expand(A.shape[0])
    residual = 0.0 if found is None else found.residual
    margin = torch.tensor(4 * (1 + size) * max(residual, spectrum.error, TOLERANCE * size))
    families = Families(constant, growth(values), margin, torch.zeros(()))
    return LayerMode(1 + largest, 1 + values.numpy(), residual, families)


def _varying(parts: Branch, A: AttentionOperator, tolerance: float) -> krylov.Ritz | None:
    """The eigenvalue ν of Σ_h H_h⊗A_h with the largest |1 + ν| on tokens up to a constant; None for a single token."""
    tokens, dim = A.shape[-1], parts.projection.shape[1]
    if tokens == 1:
        return None
    precise = A.to(torch.float64)
    quotient = Quotient(tokens, torch.float64, A.device)
    value, projection = (w.to(A.device) for w in (parts.heads_value, parts.projection))

    def multiply(block: Tensor) -> Tensor:
        x = quotient.lift(block.unflatten(1, (tokens - 1, dim)).flatten(2))
        values = torch.einsum("bndw,hed->bhnew", x.unflatten(2, (dim, -1)), value)
        mixed = (precise @ values.flatten(3)).unflatten(3, values.shape[3:])
        y = torch.einsum("bhnew,hde->bndw", mixed, projection)
        image: Tensor = quotient.drop(y.flatten(2)).unflatten(2, (dim, -1)).flatten(1, 2)
        return image

    start = torch.randn(
        A.shape[0], (tokens - 1) * dim, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    found = krylov.arnoldi(
        multiply, start.to(A.device), lambda nu: (1 + nu).abs().argmax(-1, keepdim=True), 8, tolerance
    )
    if found.residual > tolerance:
        warnings.warn(
            f"the dominating eigenvalue has not converged in a Krylov space of {found.size} vectors: residual "
            f"{found.residual:.1e}, wanted {tolerance:.1e}",
            AcutanceWarning,
            stacklevel=3,
        )
    return found
