"""H from the weights: its eigenvalues and its symmetry, per layer and head, without forming dim × dim if avoidable.

In torch's layout H = W_proj W_V (dim × dim), and head h contributes H_h = W_proj[:, h] W_V[h] of rank head_dim, with
Σ_h H_h = H. A bias of either projection adds the same vector to every token whatever the tokens are: it is no part
of H.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance import sites
from acutance.attention.products import repeat_heads
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.eigenvalues import arnoldi_hull
from acutance.explain.verdict import LayerSpectrum

Norm = Literal["fold", "ignore"]

WHOLE_UP_TO = 1024  # up to this rank all eigenvalues of the whole H take seconds a layer; at 4096 half a minute


@dataclass(frozen=True)
class Branch:
    """The two factors of H in float64."""

    value: Tensor  # W_V (kv_heads, head_dim, dim), the pre-norm's weight folded in if asked for
    projection: Tensor  # W_proj (heads, dim, head_dim), LayerScale folded in
    norm: str  # what was done with the pre-norm

    @property
    def heads_value(self) -> Tensor:
        """W_V once per query head (heads, head_dim, dim)."""
        return repeat_heads(self.value[None], len(self.projection))[0]

    @property
    def merged(self) -> tuple[Tensor, Tensor]:
        """Factors (dim, r) and (r, dim) of the whole H, r = kv_heads · head_dim.

        The query heads of a group share their values, so their parts of W_proj add up.
        """
        groups = self.projection.unflatten(0, (len(self.value), -1)).sum(1)
        return groups.transpose(0, 1).flatten(1), self.value.flatten(0, 1)


def branch(site: sites.AttentionSite, norm: Norm = "fold") -> Branch:
    """The factors of one layer's H, or of H_eff = diag(s) W_proj W_V diag(γ).

    γ is the pre-norm's weight, so H_eff acts on tokens that were divided by their size (and centred, unless the norm
    is an RMSNorm), but not yet weighted; s is the gain between projection and residual (LayerScale). Both can flip
    signs of the spectrum. A norm there, as in Gemma 2, has a size that no H has: a warning says so.
    """
    value = site.value_weight().detach().double().unflatten(0, (site.kv_heads, site.head_dim))
    projection = site.projection_weight().detach().double().unflatten(1, (site.heads, site.head_dim))
    gain, weight = site.branch_gain(), site.pre_norm_gain()
    if gain is not None:
        projection = projection * gain.detach().double()[:, None, None]
    if site.post_norm() is not None:
        warnings.warn(
            f"layer {site.layer} normalises what its attention adds ({type(site.post_norm()).__name__}): H says how "
            "tokens are mixed before that norm, not how much of it reaches the residual stream. Take the verdict from "
            "weights with caution; what is measured on data includes the norm",
            AcutanceWarning,
            stacklevel=2,
        )
    if weight is not None and norm == "fold":
        value = value * weight.detach().double()
    state = "none" if weight is None else "folded" if norm == "fold" else "left out"
    return Branch(value, projection.transpose(0, 1), state)


def layer_spectrum(site: sites.AttentionSite, norm: Norm = "fold", whole: bool | None = None) -> LayerSpectrum:
    """Eigenvalues and symmetry of H and of every head's H_h.

    H_h is a product of a tall and a wide matrix: its eigenvalues other than 0 are those of the head_dim × head_dim
    product the other way round. The whole H uses its smaller side likewise. By default all its eigenvalues are found
    where that side is at most 1024, and those that can dominate above; `whole` asks for all (True) or none (False).
    """
    parts = branch(site, norm)
    value, merged = parts.heads_value, parts.merged
    found = LayerSpectrum(
        layer=site.layer,
        heads=np.asarray(torch.linalg.eigvals((value @ parts.projection).cpu()).numpy(), dtype=np.complex128),
        head_symmetry=symmetry(parts.projection, value).cpu().numpy(),
        norm=parts.norm,
    )
    if whole or (whole is None and min(merged[0].shape) <= WHOLE_UP_TO):
        return replace(found, eigenvalues=_whole_eigenvalues(*merged), symmetry=float(symmetry(*merged)))
    # Reading the weights is what takes the time: no more of their digits than there were.
    dtype = torch.promote_types(site.value_weight().dtype, torch.float32)
    projection, wide = (factor.to(dtype) for factor in merged)
    outer, error = (None, 0.0) if whole is False else arnoldi_hull(projection, wide, layer=site.layer)
    return replace(found, symmetry=float(symmetry(projection, wide)), outer=outer, error=error)


def symmetry(projection: Tensor, value: Tensor) -> Tensor:
    """The cosine between H and Hᵀ, tr(H²)/‖H‖²: 1 symmetric, −1 antisymmetric, about 0 for random entries.

    It says the same as ‖H − Hᵀ‖/‖H + Hᵀ‖ = √((1 − c)/(1 + c)), but stays finite. H = 0 is symmetric.
    """
    dim, rank = projection.shape[-2:]
    if dim < 3 * rank:  # one dim × dim product is cheaper than three of rank × rank
        product = projection @ value
        size = product.square().sum((-2, -1))
    else:
        product = value @ projection
        size = ((projection.mT @ projection) * (value @ value.mT)).sum((-2, -1))
    along = (product * product.mT).sum((-2, -1))
    return torch.where(size > 0, along / size, 1.0).clamp(-1, 1)


@torch.no_grad()
def symmetry_over(
    checkpoints: Iterable[nn.Module | str | os.PathLike[str]], *, norm: Norm = "fold"
) -> NDArray[np.float64]:
    """The symmetry of every layer's H over a training run: (checkpoints, layers).

    Args:
        checkpoints: models, or files written by `ac.save`, in the order of training; one is held
            at a time if the iterable makes them one at a time.
        norm: whether the pre-norm's weight is folded into H.
    """
    from acutance.io.saving import load

    models = (model if isinstance(model, nn.Module) else load(model) for model in checkpoints)
    rows = [[float(symmetry(*branch(site, norm).merged)) for site in sites.find(model)] for model in models]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise AcutanceError(f"checkpoints of one model are needed; theirs have {[len(row) for row in rows]} layers")
    return np.array(rows)


def _whole_eigenvalues(projection: Tensor, value: Tensor) -> NDArray[np.complex128]:
    """All dim eigenvalues of projection @ value; from the other product and zeros where that is smaller."""
    dim, inner = projection.shape
    product = projection @ value if dim <= inner else value @ projection
    found = torch.linalg.eigvals(product.cpu()).numpy()
    return np.concatenate([found, np.zeros(dim - len(found))]).astype(np.complex128)
