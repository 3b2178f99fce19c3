"""A layer of a Spectrum as cells of a table."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from acutance.explain.dominance import Dominance, Outcome, Share
from acutance.explain.verdict import LayerSpectrum


def table_row(layer: LayerSpectrum) -> dict[str, str]:
    """One layer's cells by column."""
    low, _, half, _, high = layer.quantiles
    symmetry = float(layer.head_symmetry.mean()) if layer.symmetry is None else layer.symmetry
    row = {
        "layer": str(layer.layer),
        "verdict": layer.verdict,
        "λ < 0": f"{layer.negative_share:.0%}",
        "Re λ min / median / max": f"{low:.3f} / {half:.3f} / {high:.3f}",
        "symmetry": f"{symmetry:.2f}",
    }
    if layer.dominance is not None:
        row |= _data_cells(layer.dominance)
    return row | {"reason": layer.reason}


def _data_cells(dominance: Dominance) -> dict[str, str]:
    def mean(shares: tuple[Share, ...]) -> str:
        pairs = [(s.smoothing, s.sharpening) for s in shares]
        return str(Share(*np.mean(pairs, axis=0).tolist()))

    def outcome(found: Outcome) -> str:
        return "–" if math.isnan(found.agreement) else f"{found.agreement:.0%} ({found.base_rate:.0%})"

    branch = dominance.branch
    return {
        "μ_min": _spread(dominance.mu_min_by_sample),
        "max|μ|": _spread(dominance.mu_largest_by_sample),
        "H⊗A %": "–" if dominance.whole is None else mean(dominance.whole),
        "by head %": mean(dominance.heads),
        "HFC/LFC fell": f"{branch.fell:.0%}",
        "fell|smooth / rose|sharp": f"{percent(branch.fell_if_smoothing)} / {percent(branch.rose_if_sharpening)}",
        "rank": signed(branch.correlation),
        "agrees (base)": outcome(branch),
        "block (base)": outcome(dominance.block),
    }


def _spread(per_sample: NDArray[np.float64]) -> str:
    """Mean, lowest and highest over samples and heads."""
    return f"{per_sample.mean():.2f} ({per_sample.min():.2f} to {per_sample.max():.2f})"


def percent(share: float) -> str:
    """A share; a dash where there is none."""
    return "–" if math.isnan(share) else f"{share:.0%}"


def signed(value: float) -> str:
    """A correlation; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:+.2f}"
