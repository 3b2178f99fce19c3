"""Metrics of the token matrix X alone: how alike the tokens of one layer are.

Every function takes tokens (..., tokens, channels) and an optional bool mask (..., tokens), True where a token counts.
It returns one number per leading index. None depends on a rotation of the channels, the order of the tokens or a common
factor. Masked tokens may hold anything, NaN included.
"""

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from acutance.errors import ShapeError
from acutance.metrics import sums
from acutance.metrics.sums import masked_mean, metric, ratio, safe_sqrt, split_mean, valid_positions


@metric("tokens", "smoother", (-1, 1), "Mean cosine over pairs of tokens: 1 when all point the same way.")
def token_cosine(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean cosine over all pairs of different tokens (arXiv 2312.00751, E.3).

    A zero vector has cosine 0 with everything. With fewer than two tokens it is 1, as for equal tokens.
    """
    x, valid = _select(tokens, mask)
    directions = sums.unit_vectors(x)
    # Σ_{i≠j} x̂_i·x̂_j = ‖Σ x̂_i‖² − Σ ‖x̂_i‖²: no pair is ever formed.
    pairs = directions.sum(-2).square().sum(-1) - directions.square().sum((-2, -1))
    return sums.mean_cosine(pairs, valid.sum(-1).to(x.dtype))


def low_frequency(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """LFC[X] = (1/n) 11ᵀ X: every token replaced by the mean token (arXiv 2401.04301); 0 where masked out."""
    x, valid = _select(tokens, mask)
    return split_mean(x, valid)[0].expand_as(x).masked_fill(~valid.unsqueeze(-1), 0)


def high_frequency(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """HFC[X] = X − LFC[X]: how each token differs from the mean (arXiv 2401.04301); 0 where masked out."""
    x, valid = _select(tokens, mask)
    return split_mean(x, valid)[1].masked_fill(~valid.unsqueeze(-1), 0)


@metric("tokens", "sharper", (0, inf), "Largest deviation from the mean token, relative to the mean.")
def hfc_lfc_spectral(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖HFC[X]‖₂ / ‖LFC[X]‖₂ in the spectral norm (arXiv 2401.04301)."""
    high, low_square = _scaled_frequencies(tokens, mask)
    return sums.hfc_over_lfc(_squared_singular_values(high)[..., 0], low_square)


@metric("tokens", "sharper", (0, inf), "All deviations from the mean token, relative to the mean.")
def hfc_lfc_frobenius(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖HFC[X]‖_F / ‖LFC[X]‖_F in the Frobenius norm (arXiv 2401.04301)."""
    high, low_square = _scaled_frequencies(tokens, mask)
    return sums.hfc_over_lfc(high.square().sum((-2, -1)), low_square)


@metric("tokens", "sharper", (0, 1), "The share of the tokens that is not their mean.")
def rank_residual(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖X − 1x̄ᵀ‖_F / ‖X‖_F: the share of X that is not the mean token; 0 for a zero matrix."""
    high, low_square = _scaled_frequencies(tokens, mask)
    return sums.residual(high.square().sum((-2, -1)), low_square)


@metric("tokens", "sharper", (0, 1), "Second over first singular value: 0 when tokens span one line.")
def singular_ratio(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """σ₂/σ₁ of X: 0 when the tokens span one line (rank collapse), or are all zero."""
    sigma = pad(safe_sqrt(_relative_squares(tokens, mask)), (0, 1))  # a single σ has a second of 0
    return ratio(sigma[..., 1], sigma[..., 0])


@metric("tokens", "sharper", (0, inf), "How many directions the tokens use, by the entropy of σ.")
def effective_rank(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """exp of the entropy of σ/Σσ: how many directions the tokens use; 0 for a zero matrix."""
    sigma = safe_sqrt(_relative_squares(tokens, mask))
    share = ratio(sigma, sigma.sum(-1, keepdim=True))
    share = torch.where(share == 0, 1, share)  # 1·log 1 = 0: an absent direction adds nothing
    return torch.where(sigma[..., 0] == 0, 0, torch.exp(-(share * share.log()).sum(-1)))


@metric("tokens", "sharper", (0, inf), "How many directions the tokens use, by their energy.")
def stable_rank(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖X‖_F² / σ₁²: a smooth lower bound of the rank; 0 for a zero matrix."""
    squares = _relative_squares(tokens, mask)
    return ratio(squares.sum(-1), squares[..., 0])


@metric("tokens", "neither", (0, inf), "How much the tokens' norms differ, relative to their mean.")
def norm_spread(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Standard deviation over mean of the tokens' norms (population form); 0 when all tokens are zero."""
    x, valid = _select(tokens, mask)
    norms = torch.linalg.vector_norm(_rescaled(x), dim=-1)
    mean = masked_mean(norms, valid)
    variance = masked_mean((norms - mean.unsqueeze(-1)).square(), valid)
    return sums.spread(mean, variance)


def _select(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens in float32 or better, with zeros where masked out, and the mask (..., tokens)."""
    if tokens.ndim < 2 or 0 in tokens.shape:
        raise ShapeError(f"tokens {tuple(tokens.shape)}: give (..., tokens, channels), not empty; a mask drops tokens")
    valid = valid_positions(mask, tokens)
    wide = tokens.to(torch.promote_types(torch.float32, tokens.dtype))  # sums in half precision are inaccurate
    return wide.masked_fill(~valid.unsqueeze(-1), 0), valid


def _rescaled(x: Tensor) -> Tensor:
    """X times a power of two (so without rounding) that brings its largest entry near 1."""
    limits = torch.finfo(x.dtype)
    largest = x.detach().abs().amax((-2, -1), keepdim=True).clamp(4 * limits.tiny, limits.max / 4)
    mantissa, _ = torch.frexp(largest)
    return x * (mantissa / largest)


def _scaled_frequencies(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """HFC, and the squared norm n ‖x̄‖² of the rank-one LFC (in every norm), up to a common factor."""
    x, valid = _select(tokens, mask)
    mean, deviation = split_mean(_rescaled(x), valid)
    return deviation.masked_fill(~valid.unsqueeze(-1), 0), valid.sum(-1) * mean.square().sum((-2, -1))


def _relative_squares(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The squared singular values of X in decreasing order, up to a common factor: only their ratios have a meaning."""
    return _squared_singular_values(_rescaled(_select(tokens, mask)[0]))


def _squared_singular_values(x: Tensor) -> Tensor:
    """The eigenvalues of the Gram matrix of the smaller side, in float64: fast and batched.

    Values below about max(tokens, channels)·ε of the largest are rounding and become 0.
    """
    wide = x.double()
    gram = wide @ wide.mT if x.shape[-2] <= x.shape[-1] else wide.mT @ wide
    # LAPACK would fail for the whole batch on one NaN: answer NaN for that sample alone.
    finite = torch.isfinite(gram).all(-1).all(-1)
    squares = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0)).flip(-1)
    floor = squares[..., :1] * max(x.shape[-2:]) * torch.finfo(torch.float64).eps
    squares = torch.where(squares > floor, squares, 0)
    return torch.where(finite.unsqueeze(-1), squares, torch.nan).to(x.dtype)
