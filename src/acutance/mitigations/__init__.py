"""Mitigations of over-smoothing: one paper, one file, one class.

Every file of this folder is imported, so a new one needs `@register` and nothing else. None of them knows models.
"""

import pkgutil
from importlib import import_module

from acutance.mitigations.attnscale import AttnScale
from acutance.mitigations.base import REGISTRY, Combined, LayerShape, Mitigation, as_mitigation, parse, register
from acutance.mitigations.eigen import Eigen, eigen_of
from acutance.mitigations.featscale import FeatScale
from acutance.mitigations.neutreno import NeuTRENO

__all__ = ["REGISTRY", "Combined", "LayerShape", "Mitigation", "as_mitigation", "parse", "register"]
__all__ += ["AttnScale", "Eigen", "FeatScale", "NeuTRENO", "eigen_of"]

for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
