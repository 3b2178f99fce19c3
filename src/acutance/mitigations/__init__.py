"""Mitigations of over-smoothing: one paper, one file, one class.

Every file of this folder is imported, so a new one needs `@register` and nothing else. None of them knows models.
"""

import pkgutil
from importlib import import_module

from acutance.mitigations.attnscale import AttnScale
from acutance.mitigations.base import Combined, LayerShape, Mitigation, UnknownShape
from acutance.mitigations.eigen import Eigen, Weights, eigen_of, weights_together
from acutance.mitigations.featscale import FeatScale
from acutance.mitigations.neutreno import NeuTRENO
from acutance.mitigations.spec import REGISTRY, as_mitigation, parse, register

__all__ = [
    "REGISTRY",
    "AttnScale",
    "Combined",
    "Eigen",
    "FeatScale",
    "LayerShape",
    "Mitigation",
    "NeuTRENO",
    "UnknownShape",
    "Weights",
    "as_mitigation",
    "eigen_of",
    "parse",
    "register",
    "weights_together",
]

for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
