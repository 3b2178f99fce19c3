"""Metrics of over-smoothing: pure, batched functions, one definition each.

Token metrics are formulas in the tokens of a layer, attention metrics in its attention operator. The two
registries name what `acutance.measure` can read.
"""

from collections.abc import Callable
from math import inf
from typing import Literal, NamedTuple

from torch import Tensor

from acutance.attention import AttentionCall
from acutance.metrics.attention import attention_cosine, attention_entropy, head_cosine
from acutance.metrics.energy import energy, fidelity, gradient_alignment, log_nonlocal_energy_raw, nonlocal_energy
from acutance.metrics.sums import check_finite, unit_vectors
from acutance.metrics.tokens import (
    effective_rank,
    hfc_lfc_frobenius,
    hfc_lfc_spectral,
    high_frequency,
    low_frequency,
    norm_spread,
    rank_residual,
    singular_ratio,
    stable_rank,
    token_cosine,
)

TOKEN_METRICS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "token_cosine": token_cosine,
    "hfc_lfc_spectral": hfc_lfc_spectral,
    "hfc_lfc_frobenius": hfc_lfc_frobenius,
    "rank_residual": rank_residual,
    "singular_ratio": singular_ratio,
    "effective_rank": effective_rank,
    "stable_rank": stable_rank,
    "norm_spread": norm_spread,
}

# `attention_cosine` is not here: it compares two layers, and a record is one.
ATTENTION_METRICS: dict[str, Callable[[AttentionCall, Tensor | None], Tensor]] = {
    "nonlocal_energy": lambda record, mask: nonlocal_energy(record.A, record.output, mask),
    "log_nonlocal_energy_raw": lambda record, mask: log_nonlocal_energy_raw(record.A, record.output, mask),
    "gradient_alignment": lambda record, mask: gradient_alignment(record.A, record.values, mask),
    "attention_entropy": lambda record, mask: attention_entropy(record.A, mask),
    "head_cosine": lambda record, mask: head_cosine(record.A, mask),
}


class Meaning(NamedTuple):
    """What a metric tells: where tokens go as it grows, the range of its values, and one sentence."""

    higher: Literal["smoother", "sharper", "neither"]
    range: tuple[float, float]
    sentence: str


MEANINGS = {
    "token_cosine": Meaning("smoother", (-1, 1), "Mean cosine over pairs of tokens: 1 when all point the same way."),
    "hfc_lfc_spectral": Meaning("sharper", (0, inf), "Largest deviation from the mean token, relative to the mean."),
    "hfc_lfc_frobenius": Meaning("sharper", (0, inf), "All deviations from the mean token, relative to the mean."),
    "rank_residual": Meaning("sharper", (0, 1), "The share of the tokens that is not their mean."),
    "singular_ratio": Meaning("sharper", (0, 1), "Second over first singular value: 0 when tokens span one line."),
    "effective_rank": Meaning("sharper", (0, inf), "How many directions the tokens use, by the entropy of σ."),
    "stable_rank": Meaning("sharper", (0, inf), "How many directions the tokens use, by their energy."),
    "norm_spread": Meaning("neither", (0, inf), "How much the tokens' norms differ, relative to their mean."),
    "nonlocal_energy": Meaning("sharper", (0, inf), "How much tokens differ from those they attend to."),
    "log_nonlocal_energy_raw": Meaning("sharper", (-inf, inf), "The same with the raw kernel, as a logarithm."),
    "gradient_alignment": Meaning("neither", (-1, 1), "Whether attention descends the energy of its symmetric kernel."),
    "attention_entropy": Meaning("smoother", (0, inf), "How many tokens a row of attention spreads over, in nats."),
    "head_cosine": Meaning("neither", (0, 1), "How alike the heads attend: 1 when all do the same."),
    "attention_cosine": Meaning("neither", (0, 1), "How alike two layers attend: 1 when the second repeats the first."),
}

__all__ = [
    "ATTENTION_METRICS",
    "MEANINGS",
    "TOKEN_METRICS",
    "attention_cosine",
    "attention_entropy",
    "check_finite",
    "effective_rank",
    "energy",
    "fidelity",
    "gradient_alignment",
    "head_cosine",
    "hfc_lfc_frobenius",
    "hfc_lfc_spectral",
    "high_frequency",
    "log_nonlocal_energy_raw",
    "low_frequency",
    "nonlocal_energy",
    "norm_spread",
    "rank_residual",
    "singular_ratio",
    "stable_rank",
    "token_cosine",
    "unit_vectors",
]
