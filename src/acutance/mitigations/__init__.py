"""Mitigations of over-smoothing: one paper, one file, one class.

Every file of this folder is imported, so a new one needs `@register` and nothing else. None of them knows models.
"""

import pkgutil
from importlib import import_module

from acutance.mitigations.attnscale import AttnScale as AttnScale
from acutance.mitigations.base import REGISTRY as REGISTRY
from acutance.mitigations.base import Combined as Combined
from acutance.mitigations.base import LayerShape as LayerShape
from acutance.mitigations.base import Mitigation as Mitigation
from acutance.mitigations.base import UnknownShape as UnknownShape
from acutance.mitigations.base import as_mitigation as as_mitigation
from acutance.mitigations.base import parse as parse
from acutance.mitigations.base import register as register
from acutance.mitigations.eigen import Eigen as Eigen
from acutance.mitigations.eigen import eigen_of as eigen_of
from acutance.mitigations.featscale import FeatScale as FeatScale
from acutance.mitigations.neutreno import NeuTRENO as NeuTRENO

for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
