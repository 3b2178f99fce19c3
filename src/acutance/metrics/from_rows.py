"""Energy and entropy of an attention operator from one reduction of `acutance.attention.kernels.attention_sums`.

The formulas are those of `acutance.metrics.energy` and `acutance.metrics.attention`, where all rows count. What is left
to divide by is a number, which the host divides by in the end: on the device each division would be a launch.
"""

from __future__ import annotations

from torch import Tensor

from acutance.attention import AttentionCall
from acutance.attention.kernels import attention_sums

FROM_ROWS = ("nonlocal_energy", "attention_entropy")


def from_rows(record: AttentionCall, mask: Tensor | None) -> dict[str, tuple[Tensor, float]]:
    """By metric, numbers (batch, heads) and what they are to be multiplied by; none where some rows do not count."""
    A, u = record.A, record.output
    fits = u.ndim == 4 and A.shape[2] == A.shape[3] == u.shape[2] and u.shape[1] in (A.heads, A.key_heads)
    if mask is not None or A.mask is not None or not fits or not attention_sums.is_available(A, u):
        return {}
    _, entropies, energies = attention_sums.row_sums(A, u).sums.sum(-1).unbind()
    return {"nonlocal_energy": (energies, 1 / 2), "attention_entropy": (entropies, 1 / A.shape[2])}
