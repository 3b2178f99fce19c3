"""Measure, explain and mitigate over-smoothing in Transformers.

Three verbs: `measure` says how smooth a model is, layer by layer; `explain` says why, by signed spectra and a verdict
per layer; `mitigate` changes it, in place, and hands back what puts it back.
"""

from acutance import laboratory, metrics, models, sites, spectral_theory, steer, theory
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import Spectrum, explain
from acutance.maps import attention_maps
from acutance.measure import measure
from acutance.mitigate import mitigate
from acutance.mitigations import AttnScale, Eigen, FeatScale, Mitigation, NeuTRENO
from acutance.monitor import Monitor
from acutance.operator import AttentionOperator
from acutance.profile import Profile
from acutance.saving import load, save
from acutance.steer import fold
from acutance.version import __version__

__all__ = [
    "AcutanceError",
    "AcutanceWarning",
    "AttentionOperator",
    "AttnScale",
    "Eigen",
    "FeatScale",
    "Mitigation",
    "Monitor",
    "NeuTRENO",
    "Profile",
    "Spectrum",
    "__version__",
    "attention_maps",
    "explain",
    "fold",
    "laboratory",
    "load",
    "measure",
    "metrics",
    "mitigate",
    "models",
    "save",
    "sites",
    "spectral_theory",
    "steer",
    "theory",
]
