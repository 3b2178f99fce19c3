"""Mitigations of over-smoothing: one paper, one file, one class."""

from acutance.mitigations.attnscale import AttnScale
from acutance.mitigations.base import REGISTRY, Chain, LayerShape, Mitigation, register
from acutance.mitigations.featscale import FeatScale
from acutance.mitigations.neutreno import NeuTRENO
from acutance.mitigations.spec import as_mitigation, parse

__all__ = [
    "REGISTRY",
    "AttnScale",
    "Chain",
    "FeatScale",
    "LayerShape",
    "Mitigation",
    "NeuTRENO",
    "as_mitigation",
    "parse",
    "register",
]
