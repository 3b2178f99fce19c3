"""H from the weights: its eigenvalues and its symmetry, per layer and head, without forming dim × dim if avoidable.

In torch's layout H = W_proj W_V (dim × dim), and head h contributes H_h = W_proj[:, h] W_V[h] of rank head_dim, with
Σ_h H_h = H. A bias of either projection adds the same vector to every token: it is no part of H.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from acutance import sites
from acutance.attention.products import repeat_heads
from acutance.attention.spectra import arnoldi, random_like
from acutance.errors import AcutanceError, require_finite, warn
from acutance.explain.spectral_theory import Series
from acutance.explain.spectrum import Eigenvalues, LayerSpectrum

Norm = Literal["fold", "ignore"]
WHOLE_UP_TO = 1024  # up to this rank all eigenvalues of the whole H take seconds a layer; at 4096 half a minute
ROUNDING = 100  # how many times a dtype's precision a residual may be, as a share of the rms of H's singular values


def factors(site: sites.AttentionSite, norm: Norm = "fold") -> tuple[Tensor, Tensor, str]:
    """W_V (kv_heads, head_dim, dim) and W_proj (heads, dim, head_dim) of one layer in float64, and the norm's state.

    They are those of H_eff = diag(s) W_proj W_V diag(γ). γ is the pre-norm's weight, so H_eff acts on tokens that were
    divided by their size (and centred, unless the norm is an RMSNorm), but not yet weighted; s is the gain between
    projection and residual (LayerScale). Both can flip signs of the spectrum. A norm there, as in Gemma 2, has a size
    that no H has: a warning says so.
    """

    def read(name: str, tensor: Tensor) -> Tensor:
        return require_finite(tensor.detach().double(), f"layer {site.layer}: {name}")  # type: ignore[no-any-return]

    value = read("W_V", site.value_weight()).unflatten(0, (site.kv_heads, site.head_dim))
    projection = read("W_proj", site.projection_weight()).unflatten(1, (site.heads, site.head_dim))
    gain, weight = site.branch_gain(), site.pre_norm_gain()
    if gain is not None:
        projection = projection * read("the branch's gain", gain)[:, None, None]
    if site.post_norm() is not None:
        why = "H has no such norm, so its verdict from weights alone is uncertain; what is measured on data includes it"
        warn(f"layer {site.layer} normalises what its attention adds ({type(site.post_norm()).__name__}). {why}")
    if weight is not None and norm == "fold":
        value = value * read("the pre-norm's weight", weight)
    state = "none" if weight is None else "folded" if norm == "fold" else "left out"
    return value, projection.transpose(0, 1), state


def whole_factors(value: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (dim, r) and (r, dim) of the whole H: query heads that share values add up in W_proj."""
    groups = projection.unflatten(0, (len(value), -1)).sum(1)
    return groups.transpose(0, 1).flatten(1), value.flatten(0, 1)


def layer_spectrum(site: sites.AttentionSite, norm: Norm = "fold", whole: bool | None = None) -> LayerSpectrum:
    """Eigenvalues and symmetry of H and of every head's H_h, from the smaller product of their factors.

    By default all eigenvalues of H up to rank 1024, and those that can dominate above; `whole` asks for all or none.
    """
    value, projection, state = factors(site, norm)
    left, right = whole_factors(value, projection)
    value = repeat_heads(value[None], site.heads)[0]
    heads, head_symmetry = _eigenvalues(value @ projection, site.layer), symmetry(projection, value).cpu().numpy()
    every, outer, error = None, None, 0.0
    if whole or (whole is None and min(left.shape) <= WHOLE_UP_TO):
        every = _eigenvalues(torch.mm(*smaller(left, right)), site.layer)
        every = np.pad(every, (0, len(left) - len(every)))
    else:
        # Reading the weights is what takes the time: no more of their digits than there were.
        dtype = torch.promote_types(site.value_weight().dtype, torch.float32)
        left, right = left.to(dtype), right.to(dtype)
        outer, error = (None, 0.0) if whole is False else arnoldi_hull(left, right, layer=site.layer)
    mean, power, alike = (float(value) for value in moments(left, right))
    found = LayerSpectrum(site.layer, heads, head_symmetry, every, outer, error, symmetry=alike, norm=state)
    return replace(found, mean=mean / len(left), power=power / len(left))


def smaller(projection: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The factors in the order in which their product is small: it has all eigenvalues of H, but fewer zeros."""
    return (projection, value) if len(projection) <= len(value) else (value, projection)


def _eigenvalues(matrix: Tensor, layer: int) -> Eigenvalues:
    found = torch.linalg.eigvals(require_finite(matrix.cpu(), f"layer {layer}: H"))
    return np.asarray(found.numpy(), dtype=np.complex128)


def arnoldi_hull(projection: Tensor, value: Tensor, *, layer: int) -> tuple[Eigenvalues, float]:
    """The corners of the convex hull of the spectrum of H = projection @ value, and the largest residual that counts.

    A residual ‖Hz − λz‖ says how close to H a matrix with the eigenvalue λ is. If not all corners have converged, a
    warning says so, and the residual is that of the largest |1 + λ| and of the ends of Re λ.
    """
    left, right = smaller(projection, value)
    # One vector at a time: a block finds repeated eigenvalues, which a maximum has no use for, but reaches a lower
    # power of H with as many vectors.
    start = random_like(left[:, :1])
    product = require_finite(left @ (right @ start), f"layer {layer}: H")
    size = float(product.norm() / start.norm())  # ‖H‖_F/√d on average
    tolerance = size * ROUNDING * torch.finfo(projection.dtype).eps
    found = arnoldi(
        lambda x: left @ (right @ x), start, lambda ritz: torch.tensor(hull_indices(ritz.numpy())), 16, tolerance
    )
    values = found.values.cpu().numpy().astype(np.complex128)
    ends = [int(np.abs(1 + values).argmax()), int(values.real.argmin()), int(values.real.argmax())]
    error = max(float(found.residuals[ends].max()), tolerance)
    if found.residuals.max() > tolerance:
        what = f"not all converged in {found.size} vectors (residual {error:.1e}, wanted {tolerance:.1e})"
        warn(f"layer {layer}: outer eigenvalues of H have {what}. explain(…, whole=True) finds all eigenvalues exactly")
    if len(left) < len(projection):  # the small product lacks zeros
        values = np.append(values, 0)
        values = values[hull_indices(values)]
    return values, error


def hull_indices(points: Eigenvalues) -> list[int]:
    """The corners of the convex hull, by Andrew's monotone chain: only they can dominate, as |1 + λμ| is convex."""
    ordered: list[int] = np.unique(points, return_index=True)[1].tolist()  # by real part, then by imaginary part
    boundary: list[int] = []
    for chain in (ordered, ordered[::-1]):
        side: list[int] = []
        for i in chain:
            while len(side) > 1:
                a, b, c = points[[*side[-2:], i]]
                if ((b - a).conjugate() * (c - a)).imag > 0:  # it turns left
                    break
                side.pop()
            side.append(i)
        boundary += side[:-1]
    return boundary or ordered


def convex_hull(eigenvalues: Eigenvalues) -> Tensor:
    """The corners of each row's convex hull (rows, k); short rows repeat one."""
    hulls = [row[hull_indices(row)].tolist() for row in eigenvalues]
    longest = max(len(hull) for hull in hulls)
    return torch.tensor([hull + hull[-1:] * (longest - len(hull)) for hull in hulls], dtype=torch.complex128)


def symmetry(projection: Tensor, value: Tensor) -> Tensor:
    """The cosine between H and Hᵀ, tr(H²)/‖H‖²: 1 symmetric (so is H = 0), −1 antisymmetric, about 0 if random."""
    return moments(projection, value)[2]


def moments(projection: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tr H, ‖H‖²_F and the symmetry of H = projection @ value."""
    dim, rank = projection.shape[-2:]
    if dim < 3 * rank:  # one dim × dim product is cheaper than three of rank × rank
        product = projection @ value
        size = product.square().sum((-2, -1))
    else:
        product = value @ projection
        size = ((projection.mT @ projection) * (value @ value.mT)).sum((-2, -1))
    along = (product * product.mT).sum((-2, -1))
    trace = product.diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace, size, torch.where(size > 0, along / size, 1.0).clamp(-1, 1)


@torch.no_grad()
def symmetry_over(checkpoints: Iterable[nn.Module | str | os.PathLike[str]], *, norm: Norm = "fold") -> Series:
    """The symmetry of every layer's H over a training run: (checkpoints, layers).

    Args:
        checkpoints: models or files of `ac.save`, in the order of training; an iterator holds one at a time.
        norm: whether the pre-norm's weight is folded into H.
    """
    from acutance.io.saving import load

    models = (model if isinstance(model, nn.Module) else load(model) for model in checkpoints)
    rows = [[layer_spectrum(site, norm, whole=False).symmetry for site in sites.find(model)] for model in models]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise AcutanceError(f"checkpoints of one model are needed; theirs have {[len(row) for row in rows]} layers")
    return np.array(rows)
