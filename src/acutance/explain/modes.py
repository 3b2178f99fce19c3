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

from acutance.attention import spectra
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.competitors import visible_keys
from acutance.explain.quotient import Quotient
from acutance.explain.spectral_theory import FAMILIES, Families, Family, growth
from acutance.explain.weights import Branch, Norm, branch, layer_spectrum
from acutance.sites import AttentionSite

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
    with A: a check of `explain`'s count for a few samples, not a replacement. Triangular attention needs none, but the
    eigenvalues of a dim × dim matrix for every token.

    Args:
        site: the layer's weights.
        A: its attention, e.g. `record.A` of what `site.observe` hands over; without padding.
        norm: whether the pre-norm's weight is folded into H, as in `explain`.
    """
    _check_unpadded(A)
    spectrum = layer_spectrum(site, norm)
    lam = spectrum.deciding
    assert lam is not None, "the whole H is found by default"
    largest = complex(lam[np.abs(1 + lam).argmax()])
    size = float(np.abs(lam).max())
    values, residual = _varying(branch(site, norm), A, TOLERANCE * size)
    if values is None:
        values = torch.full((A.shape[0],), largest, dtype=torch.complex128)
    constant = growth(torch.tensor(largest, dtype=torch.complex128)).expand(A.shape[0])
    margin = torch.tensor(4 * (1 + size) * max(residual, spectrum.error, TOLERANCE * size))
    families = Families(constant, growth(values), margin, torch.zeros(()))
    return LayerMode(1 + largest, 1 + values.numpy(), residual, families)


def _check_unpadded(A: AttentionOperator) -> None:
    """Padding sees others or nothing and is seen by none: its eigenvalues are no part of the layer."""
    seen = visible_keys(A)
    if seen is not None and not bool(seen.all()):
        padded = int((~seen.all(-1)).sum())
        raise AcutanceError(
            f"{padded} of {A.shape[0]} samples of this attention {A.shape} (batch, heads, queries, keys) have padding, "
            "tokens that no token sees: give layer_mode the attention of samples without it, one at a time if their "
            "lengths differ"
        )


def _varying(parts: Branch, A: AttentionOperator, tolerance: float) -> tuple[Tensor | None, float]:
    """Of Σ_h H_h⊗A_h the eigenvalue ν (batch,) with the largest |1 + ν| on tokens up to a constant, and its residual.

    A single token has none.
    """
    if A.shape[-1] == 1:
        return None, 0.0
    precise = A.to(torch.float64)
    if A.is_triangular:
        return _token_by_token(parts, precise), 0.0
    found = _by_products(parts, precise, tolerance)
    return found.values[:, 0].cpu(), found.residual


def _token_by_token(parts: Branch, A: AttentionOperator) -> Tensor:
    """Triangular in the tokens, the layer has the eigenvalues of Σ_h A_h[i, i] H_h of every token i.

    The first token sees itself alone, so its are those of H, which constant tokens have. So far from normal is such a
    layer that Arnoldi iteration would find pseudo-eigenvalues, with residuals as small as wanted.
    """
    value, projection = parts.heads_value.cpu(), parts.projection.cpu()
    wide, tall = value.flatten(0, 1), projection.transpose(0, 1).flatten(1)
    kept = A.diagonal().cpu().repeat_interleave(value.shape[1], dim=1)  # (batch, heads · head_dim, tokens)
    best = torch.full((len(kept),), -1.0, dtype=torch.complex128)  # |1 + ν| = 0
    for i in range(1, A.shape[-1]):
        nu = torch.cat([best[:, None], torch.linalg.eigvals((tall * kept[:, None, :, i]) @ wide)], dim=-1)
        best = nu.gather(-1, (1 + nu).abs().argmax(-1, keepdim=True))[:, 0]
    return best


def _by_products(parts: Branch, precise: AttentionOperator, tolerance: float) -> spectra.Ritz:
    (batch, *_, tokens), dim, device = precise.shape, parts.projection.shape[1], precise.device
    quotient = Quotient(tokens, torch.float64, device)
    value, projection = (w.to(device) for w in (parts.heads_value, parts.projection))

    def multiply(block: Tensor) -> Tensor:
        x = quotient.lift(block.unflatten(1, (tokens - 1, dim)).flatten(2))
        values = torch.einsum("bndw,hed->bhnew", x.unflatten(2, (dim, -1)), value)
        mixed = (precise @ values.flatten(3)).unflatten(3, values.shape[3:])
        y = torch.einsum("bhnew,hde->bndw", mixed, projection)
        image: Tensor = quotient.drop(y.flatten(2)).unflatten(2, (dim, -1)).flatten(1, 2)
        return image

    start = torch.randn(batch, (tokens - 1) * dim, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = spectra.arnoldi(
        multiply, start.to(device), lambda nu: (1 + nu).abs().argmax(-1, keepdim=True), 8, tolerance
    )
    if found.residual > tolerance:
        warnings.warn(
            f"the dominating eigenvalue has not converged in a Krylov space of {found.size} vectors: residual "
            f"{found.residual:.1e}, wanted {tolerance:.1e}",
            AcutanceWarning,
            stacklevel=4,
        )
    return found
