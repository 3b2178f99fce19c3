"""What metrics share: the registry, formulas in a few sums, and safe sums, masks and divisions.

A metric needs few sums over tokens or rows. Kernels compute them in one pass, plain torch otherwise. The formulas that
turn them into the metric are here, once.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.attention import AttentionCall
from acutance.attention.kernels import attention_sums
from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.metrics.kernels.token_sums import FIELDS

Numbers = NDArray[np.float64]
Array = TypeVar("Array", Tensor, Numbers)  # sums of many layers come to the CPU together, as `Numbers`
FROM_ROWS = ("nonlocal_energy", "attention_entropy")
Metric = TypeVar("Metric", bound=Callable[..., Tensor])
Direction = Literal["smoother", "sharper", "neither"]


class Meaning(NamedTuple):
    """What a metric tells: where tokens go as it grows, the range of its values, and one sentence."""

    higher: Direction
    range: tuple[float, float]
    sentence: str


# What `measure` can read. Each metric registers itself, with its meaning beside its formula.
TOKEN_METRICS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {}
ATTENTION_METRICS: dict[str, Callable[[AttentionCall, Tensor | None], Tensor]] = {}
MEANINGS: dict[str, Meaning] = {}


def metric(of: str, higher: Direction, range: tuple[float, float], sentence: str) -> Callable[[Metric], Metric]:
    """Register a function of "tokens", or of parts of a call such as "A output", and of a mask; "" has no function."""

    def register(function: Metric) -> Metric:
        name, parts = function.__name__, of.split()
        MEANINGS[name] = Meaning(higher, range, sentence)
        if of == "tokens":
            TOKEN_METRICS[name] = function
        elif of:
            ATTENTION_METRICS[name] = lambda call, mask: function(*(getattr(call, part) for part in parts), mask)
        return function

    return register


def mean_cosine(pairs: Array, count: Array) -> Array:
    """The mean over all pairs of different tokens, given the sum over them; 1 with fewer than two tokens."""
    return ratio(pairs, count * (count - 1), at_zero=1.0).clip(-1, 1)


def hfc_over_lfc(high: Array, low: Array) -> Array:
    """‖HFC‖ / ‖LFC‖, given their squares; infinite if only the mean token is zero."""
    return ratio(safe_sqrt(high), safe_sqrt(low), at_zero=_where(high > 0, torch.inf, 0.0))


def residual(high: Array, low: Array) -> Array:
    """‖HFC‖ / ‖X‖, given ‖HFC‖² and ‖LFC‖², as HFC and LFC are orthogonal."""
    return ratio(safe_sqrt(high), safe_sqrt(high + low))


def spread(mean: Array, variance: Array) -> Array:
    """Standard deviation over mean."""
    return ratio(safe_sqrt(variance), mean)


def _from_sums(formula: Callable[..., Numbers], *fields: str) -> Callable[[Numbers], Numbers]:
    """A metric of samples without NaN, from the `FIELDS` (…, fields) of `kernels.token_sums`, on the CPU."""
    return lambda sums: formula(*(sums[..., FIELDS.index(field)] for field in fields))


FROM_SUMS: dict[str, Callable[[Numbers], Numbers]] = {
    "token_cosine": _from_sums(mean_cosine, "pairs", "count"),
    "hfc_lfc_frobenius": _from_sums(hfc_over_lfc, "high", "low"),
    "rank_residual": _from_sums(residual, "high", "low"),
    "norm_spread": _from_sums(spread, "norm_mean", "norm_variance"),
}


def from_rows(record: AttentionCall, mask: Tensor | None) -> dict[str, Tensor]:
    """`FROM_ROWS` (batch, heads) by one reduction, if all rows count."""
    A, u = record.A, record.output
    if u is None:  # of a scan
        return {}
    fits = u.ndim == 4 and A.shape[2] == A.shape[3] == u.shape[2] and u.shape[1] in (A.heads, A.key_heads)
    if mask is not None or A.mask is not None or not fits or not attention_sums.is_available(A, u):
        return {}
    _, entropies, energies = attention_sums.row_sums(A, u).sums.mean(-1).unbind()
    return {"nonlocal_energy": energies * (A.shape[2] / 2), "attention_entropy": entropies}


def valid_positions(mask: Tensor | None, tokens: Tensor, *, heads: bool = False) -> Tensor:
    """The mask expanded to those of tokens (..., tokens, channels), `heads` alike; all True where there is none."""
    shape = tokens.shape[:-1]
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=tokens.device)
    if mask.dtype != torch.bool:
        raise AcutanceError(f"a token mask must be bool (True = the token counts), got {mask.dtype}: pass mask.bool()")
    try:
        return (mask.unsqueeze(-2) if heads else mask).expand(shape)
    except RuntimeError:
        raise ShapeError(f"a mask {tuple(mask.shape)} does not fit tokens {tuple(shape)}: give (..., tokens)") from None


def split_mean(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the valid tokens (..., 1, channels), and every token less that mean.

    The mean is taken twice. The second repairs the rounding of the first, so that tokens that differ by one part in a
    million keep their differences.
    """
    mean = masked_mean(x.mT, valid.unsqueeze(-2)).unsqueeze(-2)
    deviation = x - mean
    remainder = masked_mean(deviation.mT, valid.unsqueeze(-2)).unsqueeze(-2)
    return mean + remainder, deviation - remainder


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return (torch if isinstance(condition, Tensor) else np).where(condition, yes, no)


def ratio(numerator: Array, denominator: Array, at_zero: Any = 0.0) -> Array:
    """The quotient, with `at_zero` where the denominator is 0; gradients stay finite there."""
    nonzero = denominator != 0
    return _where(nonzero, numerator / _where(nonzero, denominator, 1), at_zero)  # type: ignore[no-any-return]


def safe_sqrt(x: Array) -> Array:
    """The square root with gradient 0, not infinity, at 0."""
    return _where(x <= 0, 0, _where(x <= 0, 1, x) ** 0.5)  # type: ignore[no-any-return]


def safe_logsumexp(logs: Tensor) -> Tensor:
    """The logsumexp over the last dimension with gradient 0, not NaN, where all of it is −inf."""
    empty = (logs == -torch.inf).all(-1, keepdim=True)
    return logs.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)


def unit_vectors(x: Tensor) -> Tensor:
    """The vectors along the last dimension divided by their length; a zero vector stays zero."""
    # Dividing by the largest entry first keeps the squares inside the range of float32.
    x = ratio(x, x.detach().abs().amax(-1, keepdim=True))
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return ratio(x, length)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean over the valid entries of the last dimension; 0 where there are none."""
    return x.masked_fill(~valid, 0).sum(-1) / valid.sum(-1).clamp_min(1)


def check_finite(tensor: Tensor, *, metric: str, layer: int | str, mask: Tensor | None = None) -> None:
    """Raise `NonFiniteError` if a counted token holds NaN or infinity."""
    flags = finite_flags(tensor, mask).cpu().numpy()
    if flags[..., 1].any():
        complain(flags, metric=metric, layer=layer)


def finite_flags(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The first three `FIELDS` of tokens (..., tokens, channels), still on the device."""
    valid = valid_positions(mask, tokens)
    bad = valid & ~torch.isfinite(tokens).all(-1)
    return torch.stack([valid.sum(-1), bad.sum(-1), bad.int().argmax(-1)], -1).double()


def complain(flags: Numbers, *, metric: str, layer: int | str) -> NoReturn:
    """Raise `NonFiniteError` for tokens whose first `FIELDS` say that some are bad."""
    valid, bad, first = np.moveaxis(flags, -1, 0)[:3]
    leading = tuple(np.argwhere(bad)[0].tolist())
    place = [*leading, int(first[leading])]
    names = [*("sample", "head")[: len(leading)], "token"]
    where = ", ".join(map("{} {}".format, names, place)) if len(place) <= 3 else f"index {place}"
    found = f"{int(bad.sum())} of {int(valid.sum())} tokens hold NaN or infinity (first: {where})"
    advice = "Look at the model's output, mask out padding, and try bfloat16 or float32: float16 overflows at 65504."
    raise NonFiniteError(f"layer {layer}: {metric}: {found}. {advice}")
