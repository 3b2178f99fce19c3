"""How alike the tokens of one layer are: formulas in the token matrix X alone.

Every function takes tokens (..., tokens, channels) and an optional bool mask (..., tokens), True where a
token counts, and returns one number per leading index. All are unchanged by a rotation of the channels, by
the order of the tokens and by a common factor. Tokens that are masked out may hold anything, NaN included.

Below the formulas stands what every metric shares: precision, masks, divisions and roots that are defined at zero.
"""

from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.metrics.kernels.token_sums import FIELDS

FLAGS = FIELDS[:3]  # how many tokens count and how many of them are bad, and which is the first


def token_cosine(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean cosine over all pairs of different tokens (arXiv 2312.00751, E.3).

    A zero vector has cosine 0 with everything. With fewer than two tokens it is 1, as for equal tokens.
    """
    x, valid = _select(tokens, mask)
    count = valid.sum(-1).to(x.dtype)
    directions = unit_vectors(x)
    # Σ_{i≠j} x̂_i·x̂_j = ‖Σ x̂_i‖² − Σ ‖x̂_i‖²: no pair is ever formed.
    total = directions.sum(-2).square().sum(-1) - directions.square().sum((-2, -1))
    return ratio(total, count * (count - 1), at_zero=1.0).clamp(-1, 1)


def low_frequency(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """LFC[X] = (1/n) 11ᵀ X: every token replaced by the mean token (arXiv 2401.04301); 0 where masked out."""
    x, valid = _select(tokens, mask)
    return split_mean(x, valid)[0].expand_as(x).masked_fill(~valid.unsqueeze(-1), 0)


def high_frequency(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """HFC[X] = X − LFC[X]: what each token has of its own (arXiv 2401.04301); 0 where masked out."""
    x, valid = _select(tokens, mask)
    return split_mean(x, valid)[1].masked_fill(~valid.unsqueeze(-1), 0)


def hfc_lfc_spectral(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖HFC[X]‖₂ / ‖LFC[X]‖₂ in the spectral norm (arXiv 2401.04301)."""
    mean, high, count = _scaled_frequencies(tokens, mask)
    return _hfc_over_lfc(_singular_values(high)[..., 0].to(high.dtype), mean, count)


def hfc_lfc_frobenius(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖HFC[X]‖_F / ‖LFC[X]‖_F in the Frobenius norm (arXiv 2401.04301)."""
    mean, high, count = _scaled_frequencies(tokens, mask)
    return _hfc_over_lfc(_frobenius(high), mean, count)


def rank_residual(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖X − 1x̄ᵀ‖_F / ‖X‖_F: the share of X that is not the mean token; 0 for a zero matrix."""
    mean, high, count = _scaled_frequencies(tokens, mask)
    # ‖X‖² = ‖HFC‖² + ‖LFC‖², as the two are orthogonal.
    size = _frobenius(high)
    whole = safe_sqrt(size.square() + count * mean.square().sum((-2, -1)))
    return ratio(size, whole)


def singular_ratio(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """σ₂/σ₁ of X: 0 when the tokens span one line (rank collapse), or are all zero."""
    sigma = _relative_spectrum(tokens, mask)
    if sigma.shape[-1] < 2:
        return torch.zeros_like(sigma[..., 0])
    return ratio(sigma[..., 1], sigma[..., 0])


def effective_rank(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """exp of the entropy of σ/Σσ: how many directions the tokens really use; 0 for a zero matrix."""
    sigma = _relative_spectrum(tokens, mask)
    share = ratio(sigma, sigma.sum(-1, keepdim=True))
    share = torch.where(share == 0, 1, share)  # 1·log 1 = 0: an absent direction adds nothing
    rank = torch.exp(-(share * share.log()).sum(-1))
    return torch.where(sigma[..., 0] == 0, 0, rank)


def stable_rank(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖X‖_F² / σ₁²: the rank as seen by energy; 0 for a zero matrix."""
    sigma = _relative_spectrum(tokens, mask)
    return ratio(sigma.square().sum(-1), sigma[..., 0].square())


def norm_spread(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Standard deviation over mean of the tokens' norms (population form); 0 when all tokens are zero."""
    x, valid = _select(tokens, mask)
    norms = torch.linalg.vector_norm(_rescaled(x), dim=-1)
    mean = masked_mean(norms, valid)
    variance = masked_mean((norms - mean.unsqueeze(-1)).square(), valid)
    return ratio(safe_sqrt(variance), mean)


def _select(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens upcast, with zeros where masked out, and the mask (..., tokens) itself."""
    if tokens.ndim < 2 or 0 in tokens.shape:
        raise ShapeError(
            f"tokens must be (..., tokens, channels) and not empty, got shape {tuple(tokens.shape)}; "
            "to leave tokens out, mask them"
        )
    valid = valid_positions(mask, tokens.shape[:-1], tokens)
    return upcast(tokens).masked_fill(~valid.unsqueeze(-1), 0), valid


def _rescaled(x: Tensor) -> Tensor:
    """X times a power of two (so without rounding) that brings its largest entry near 1."""
    limits = torch.finfo(x.dtype)
    largest = x.detach().abs().amax((-2, -1), keepdim=True).clamp(4 * limits.tiny, limits.max / 4)
    mantissa, _ = torch.frexp(largest)
    return x * (mantissa / largest)


def _relative_spectrum(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The singular values of X in decreasing order, up to a common factor: only ratios mean anything."""
    x, _ = _select(tokens, mask)
    return _singular_values(_rescaled(x)).to(x.dtype)


def _scaled_frequencies(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The mean token, the deviations and the number of tokens, for quotients in which scale cancels."""
    x, valid = _select(tokens, mask)
    mean, deviation = split_mean(_rescaled(x), valid)
    return mean, deviation.masked_fill(~valid.unsqueeze(-1), 0), valid.sum(-1).to(x.dtype)


def _hfc_over_lfc(high_norm: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    # LFC is a rank-one matrix: √n ‖x̄‖ is its spectral and its Frobenius norm alike.
    low_norm = count.sqrt() * _frobenius(mean)
    return ratio(high_norm, low_norm, at_zero=torch.where(high_norm > 0, torch.inf, 0.0).to(high_norm.dtype))


def _frobenius(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norm


def _singular_values(x: Tensor) -> Tensor:
    """Singular values (float64, decreasing) from the Gram matrix of the smaller side: quick and batched.

    An eigenvalue of the Gram matrix is known to about max(tokens, channels)·ε of the largest one; what is
    below that is rounding, and is set to 0.
    """
    x = x.to(torch.float64)
    rows, columns = x.shape[-2:]
    gram = x @ x.mT if rows <= columns else x.mT @ x
    # LAPACK raises on NaN and would take the whole batch with it: answer NaN for the sample concerned.
    finite = torch.isfinite(gram).all(-1).all(-1)
    squares = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0)).flip(-1)
    floor = squares[..., :1] * max(rows, columns) * torch.finfo(torch.float64).eps
    squares = torch.where(squares > floor, squares, 0)
    return torch.where(finite.unsqueeze(-1), safe_sqrt(squares), torch.nan)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a metric computes in: float64 stays, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better: half precision accumulates badly."""
    return tensor.to(working_dtype(tensor.dtype))


def valid_positions(mask: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """The mask expanded to `shape` (..., tokens), all True where there is none."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=like.device)
    if mask.dtype != torch.bool:
        raise AcutanceError(
            f"a token mask must be bool (True = the token counts), got {mask.dtype}; "
            "for a mask of zeros and ones pass mask.bool()"
        )
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ShapeError(
            f"a mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(shape)}; "
            "give one True or False per token, shaped like the tokens without their channels"
        ) from None


def split_mean(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the valid tokens (..., 1, channels), and every token less that mean.

    The mean is taken twice: the first subtraction is nearly exact, so the second mean repairs the rounding of
    the first. Tokens that differ by one part in a million keep their differences.
    """
    valid = valid.unsqueeze(-1)
    count = valid.sum(-2, keepdim=True).clamp_min(1).to(x.dtype)
    mean = x.masked_fill(~valid, 0).sum(-2, keepdim=True) / count
    deviation = x - mean
    remainder = deviation.masked_fill(~valid, 0).sum(-2, keepdim=True) / count
    return mean + remainder, deviation - remainder


def ratio(numerator: Tensor, denominator: Tensor, at_zero: Tensor | float = 0.0) -> Tensor:
    """The quotient, with `at_zero` where the denominator is 0; gradients stay finite there."""
    nonzero = denominator != 0
    quotient = numerator / torch.where(nonzero, denominator, 1)
    return torch.where(nonzero, quotient, at_zero)


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root with gradient 0, not infinity, at 0."""
    zero = x <= 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


def safe_logsumexp(logs: Tensor) -> Tensor:
    """The logsumexp over the last dimension with gradient 0, not NaN, where all of it is −inf."""
    empty = (logs == -torch.inf).all(-1, keepdim=True)
    return logs.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)


def unit_vectors(x: Tensor) -> Tensor:
    """The vectors along the last dimension divided by their length; a zero vector stays zero."""
    # Dividing by the largest entry first keeps the squares inside the range of float32.
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1)
    return ratio(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean over the valid entries of the last dimension; 0 where there are none."""
    return x.masked_fill(~valid, 0).sum(-1) / valid.sum(-1).clamp_min(1)


def check_finite(tensor: Tensor, *, metric: str, layer: int | str, mask: Tensor | None = None) -> None:
    """Raise `NonFiniteError` when a token (the last dimension) that counts holds NaN or infinity."""
    bad, valid = _bad_tokens(tensor, mask)
    if not bad.any():
        return
    first = bad.nonzero()[0].tolist()
    names = {1: ["token"], 2: ["sample", "token"], 3: ["sample", "head", "token"]}.get(bad.ndim)
    where = ", ".join(f"{name} {i}" for name, i in zip(names, first, strict=True)) if names else f"index {first}"
    raise _non_finite(metric, layer, int(bad.sum()), int(valid.sum()), where)


def finite_flags(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """What `check_finite` would ask of tokens (samples, tokens, channels), left on the device: (samples, `FLAGS`)."""
    bad, valid = _bad_tokens(tokens, mask)
    return torch.stack([valid.sum(-1), bad.sum(-1), bad.int().argmax(-1)], -1).double()


def complain(flags: NDArray[np.float64], *, metric: str, layer: int | str) -> NoReturn:
    """Raise what `check_finite` would, from flags of which some are bad."""
    valid, bad, first = flags.T
    sample = int(np.flatnonzero(bad)[0])
    where = f"sample {sample}, token {int(first[sample])}"
    raise _non_finite(metric, layer, int(bad.sum()), int(valid.sum()), where)


def _bad_tokens(tensor: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which tokens that count are not finite, and which count."""
    bad = ~torch.isfinite(tensor).all(-1)
    valid = valid_positions(mask, bad.shape, tensor)
    return bad & valid, valid


def _non_finite(metric: str, layer: int | str, bad: int, valid: int, where: str) -> NonFiniteError:
    return NonFiniteError(
        f"layer {layer}: {metric}: {bad} of {valid} tokens hold NaN or infinity "
        f"(first: {where}). Look at the model's output and at its precision (float16 overflows at 65504: try "
        "bfloat16 or float32), and mask out padding that was never meant to be read."
    )
