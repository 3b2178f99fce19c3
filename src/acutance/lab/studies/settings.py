"""Fig. 4 of https://arxiv.org/abs/2401.04301 as data: one layer repeated under every norm and several spectra of H."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from acutance.errors import AcutanceError
from acutance.lab.studies.repeat import (
    Attention,
    Norm,
    Trajectory,
    attention_from,
    branch_with_spectrum,
    drawn_attention,
    random_attention,
    repeat,
)

# Name, where the norm stands, and its weights: all of one sign.
NORMS: Mapping[str, tuple[Norm, float]] = {
    "no norm": ("none", 1.0),
    "Pre-LN, weights +1": ("pre", 1.0),
    "Pre-LN, weights −1": ("pre", -1.0),
    "Post-LN, weights +1": ("post", 1.0),
    "Post-LN, weights −1": ("post", -1.0),
}
# The interval that the eigenvalues of H fill evenly. The last one lies below −2/(1 + μ_min) for every μ_min > −0.3.
SPECTRA: Mapping[str, tuple[float, float]] = {
    "λ in (0, 1]": (0.1, 1.0),
    "λ in [−1, 0)": (-1.0, -0.1),
    "λ in [−4, −3]": (-4.0, -3.0),
}
ATTENTIONS = ("fixed", "drawn", "computed")


def norm_grid(
    *, layers: int = 60, tokens: int = 16, width: int = 16, samples: int = 5, attention: str = "fixed", seed: int = 0
) -> dict[str, dict[str, Trajectory]]:
    """Trajectories by norm and by spectrum.

    Args:
        layers: how often the layer is applied.
        tokens: N.
        width: d.
        samples: random inputs; the layer is the same for all.
        attention: fixed (one random A), drawn (a new one for every layer) or computed (from X, with fixed W_Q and W_K).
        seed: of inputs, attention and eigenvectors.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, tokens, width, dtype=torch.float64, generator=generator)
    w_q, w_k = torch.randn(2, width, width, dtype=torch.float64, generator=generator) / width**0.5
    choices: dict[str, Attention] = {
        "fixed": random_attention(tokens, seed=seed),
        "drawn": drawn_attention(tokens, seed=seed),
        "computed": attention_from(w_q, w_k),
    }
    if attention not in choices:
        raise AcutanceError(f"unknown attention {attention!r}; known: {', '.join(choices)}")
    branches = {
        name: branch_with_spectrum(torch.linspace(low, high, width), seed=seed) for name, (low, high) in SPECTRA.items()
    }
    return {
        name: {
            spectrum: repeat(x, H.mT, choices[attention], layers=layers, norm=norm, norm_weight=weight)
            for spectrum, H in branches.items()
        }
        for name, (norm, weight) in NORMS.items()
    }
