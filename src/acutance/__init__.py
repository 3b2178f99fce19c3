"""Measure, explain and mitigate over-smoothing in Transformers.

Three verbs: `measure` says how smooth a model is, layer by layer; `explain` says why, by signed spectra and a verdict
per layer; `mitigate` changes it, in place, and hands back what puts it back.
"""

import sys
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any

from acutance import moved
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.measure import measure
from acutance.version import __version__

if TYPE_CHECKING:
    from acutance import io, metrics, models, sites
    from acutance.attention.operator import AttentionOperator
    from acutance.diagnose import diagnose
    from acutance.diagnose.compare import compare
    from acutance.explain import Spectrum, explain, steer, theory
    from acutance.explain.steer import fold
    from acutance.io import load, save
    from acutance.lab import studies as laboratory
    from acutance.lab.sweep.run import sweep
    from acutance.measure.maps import attention_maps
    from acutance.measure.monitor import Monitor
    from acutance.measure.penalty import penalty
    from acutance.measure.profile import Profile
    from acutance.mitigations import AttnScale, Eigen, FeatScale, Mitigation, NeuTRENO
    from acutance.sites.mitigate import mitigate

__all__ = [
    "AcutanceError", "AcutanceWarning", "AttentionOperator", "AttnScale", "Eigen", "FeatScale", "Mitigation",
    "Monitor", "NeuTRENO", "Profile", "Spectrum", "__version__", "attention_maps", "compare", "diagnose", "explain",
    "fold", "io", "laboratory", "load", "measure", "metrics", "mitigate", "models", "penalty", "save", "sites",
    "steer", "sweep", "theory",
]  # fmt: skip

_HOMES = [  # torch is imported when one of these is first used, not before
    "attention.operator:AttentionOperator", "diagnose.compare:compare", "diagnose:diagnose", "explain.steer:fold",
    "explain:Spectrum", "explain:explain", "io:load", "io:save", "lab.sweep.run:sweep", "measure.maps:attention_maps",
    "measure.monitor:Monitor", "measure.penalty:penalty", "measure.profile:Profile", "mitigations:AttnScale",
    "mitigations:Eigen", "mitigations:FeatScale", "mitigations:Mitigation", "mitigations:NeuTRENO",
    "sites.mitigate:mitigate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    value = None
    if name in __all__:  # all others are rooms, or modules that 0.1 had here
        home = next((home for home in _HOMES if home.endswith(f":{name}")), f"{moved.MOVED.get(name, name)}:")
        value = resolve_name(f"acutance.{home}")
    elif name[:1].isupper():  # any other mitigation, of a new file too
        known = resolve_name("acutance.mitigations:REGISTRY").values()
        value = next((cls for cls in known if cls.__name__ == name), None)
    if value is None:
        raise AttributeError(moved.message(f"acutance.{name}") or f"module 'acutance' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `acutance.explain` and `acutance.diagnose` the functions when the rooms of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in ("diagnose", "explain") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
