"""Why does a layer smooth or sharpen? The spectra of H and A decide (https://arxiv.org/abs/2401.04301).

The attention branch maps tokens X to X + A X W_V W_proj, so vec(X) is multiplied by I + H⊗A with
H = W_projᵀ W_Vᵀ, whose spectrum is {1 + λ_j μ_i}. If the largest of these belongs to μ = 1, the tokens drift
towards one another; if it belongs to another μ, they do not.
"""

from acutance.explain.read import explain
from acutance.explain.spectrum import Dominance, LayerSpectrum, Outcome, Share, Spectrum
from acutance.explain.weights import symmetry_over

__all__ = ["Dominance", "LayerSpectrum", "Outcome", "Share", "Spectrum", "explain", "symmetry_over"]
