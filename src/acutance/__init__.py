"""Measure, explain and mitigate over-smoothing in Transformers.

Three verbs: `measure` says how smooth a model is, layer by layer; `explain` says why, by signed spectra and a verdict
per layer; `mitigate` changes it, in place, and hands back what puts it back.
"""

from acutance import metrics, models, sites
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import Spectrum, explain, spectral_theory, steer, theory
from acutance.explain.steer import fold
from acutance.io.saving import load, save
from acutance.lab import studies as laboratory
from acutance.measure import measure
from acutance.measure.maps import attention_maps
from acutance.measure.monitor import Monitor
from acutance.measure.profile import Profile
from acutance.mitigations import AttnScale, Eigen, FeatScale, Mitigation, NeuTRENO
from acutance.sites.mitigate import mitigate
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
