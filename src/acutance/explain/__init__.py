"""The spectra of H = W_projᵀ W_Vᵀ and A decide whether a layer smooths or sharpens (https://arxiv.org/abs/2401.04301).

Here live what reads them, from weights alone or with data, the verdict on each layer, the papers' theorems as code, and
`fold` and `check_spectrum` for an `Eigen`. Formulas of metrics and mitigations, charts, and what a single library needs
belong in their own rooms.
"""

from acutance.explain.change import Change, ChangeReader, Shift
from acutance.explain.read import explain
from acutance.explain.spectrum import Dominance, LayerSpectrum, Outcome, Share, Spectrum
from acutance.explain.weights import symmetry_over

__all__ = ["Change", "ChangeReader", "Dominance", "LayerSpectrum", "Outcome", "Share", "Shift", "Spectrum"]
__all__ += ["explain", "symmetry_over"]
