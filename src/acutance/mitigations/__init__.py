"""Mitigations of over-smoothing: one paper, one file, one class.

Every file of this folder is imported, so a new one needs `@register` and nothing else. None of them knows models.
"""

import pkgutil
from importlib import import_module

from acutance.mitigations.attnscale import AttnScale
from acutance.mitigations.base import REGISTRY, Combined, LayerShape, Mitigation, as_mitigation, parse, register
from acutance.mitigations.contranorm import ContraNorm
from acutance.mitigations.eigen import Eigen, eigen_of
from acutance.mitigations.elliptical import Elliptical
from acutance.mitigations.featscale import FeatScale
from acutance.mitigations.gate import Gate
from acutance.mitigations.gfsa import GFSA
from acutance.mitigations.lsa import LSA
from acutance.mitigations.mv_split import MVSplit
from acutance.mitigations.neutreno import NeuTRENO
from acutance.mitigations.reattention import Reattention
from acutance.mitigations.rpc import RPC
from acutance.mitigations.shaped import Shaped
from acutance.mitigations.sink import Sink
from acutance.mitigations.talking_heads import TalkingHeads
from acutance.mitigations.twicing import Twicing
from acutance.mitigations.value_residual import ValueResidual
from acutance.mitigations.xsa import XSA

__all__ = ["REGISTRY", "Combined", "LayerShape", "Mitigation", "as_mitigation", "parse", "register"]
__all__ += ["GFSA", "LSA", "AttnScale", "ContraNorm", "Eigen", "Elliptical", "FeatScale", "Gate", "MVSplit", "NeuTRENO"]
__all__ += ["RPC", "XSA", "Reattention", "Shaped", "Sink", "TalkingHeads", "Twicing", "ValueResidual", "eigen_of"]

for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
