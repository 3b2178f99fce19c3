"""Metrics of over-smoothing: pure, batched functions, one definition each.

Token metrics are formulas in the tokens of a layer, attention metrics in its attention operator. The two
registries name what `acutance.measure` can read.
"""

from collections.abc import Callable

from torch import Tensor

from acutance.attention import AttentionCall
from acutance.metrics.attention import attention_cosine, attention_entropy, head_cosine
from acutance.metrics.energy import (
    energy,
    fidelity,
    gradient_alignment,
    log_nonlocal_energy_raw,
    nonlocal_energy,
)
from acutance.metrics.tokens import (
    check_finite,
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
    unit_vectors,
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

__all__ = [
    "ATTENTION_METRICS",
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
