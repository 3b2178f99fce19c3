"""Metrics of over-smoothing: pure, batched functions, one definition each.

Token metrics are formulas in the tokens of a layer, attention metrics in its attention operator. Those marked
`@metric` are what `acutance.measure` can read. Nothing here knows models or layers.
"""

from acutance.metrics.attention import attention_cosine, attention_entropy, head_cosine
from acutance.metrics.energy import energy, fidelity, gradient_alignment, log_nonlocal_energy_raw, nonlocal_energy
from acutance.metrics.sums import ATTENTION_METRICS, MEANINGS, TOKEN_METRICS, check_finite, unit_vectors
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

__all__ = ["ATTENTION_METRICS", "MEANINGS", "TOKEN_METRICS", "check_finite", "unit_vectors"]
__all__ += ["attention_cosine", "attention_entropy", "head_cosine"]
__all__ += ["energy", "fidelity", "gradient_alignment", "log_nonlocal_energy_raw", "nonlocal_energy"]
__all__ += ["effective_rank", "hfc_lfc_frobenius", "hfc_lfc_spectral", "high_frequency", "low_frequency"]
__all__ += ["norm_spread", "rank_residual", "singular_ratio", "stable_rank", "token_cosine"]
