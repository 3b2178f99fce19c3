"""All targets by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from acutance.errors import AcutanceError
from acutance.lab.reproduce import ablation, beyond, neutreno, oversmoothing
from acutance.lab.reproduce.target import Target

ALL = (*neutreno.TARGETS, *ablation.TARGETS, *beyond.TARGETS, *oversmoothing.TARGETS)
TARGETS: Mapping[str, Target] = {target.name: target for target in ALL}


def find(name: str) -> Target:
    """A target that can be run."""
    if name not in TARGETS:
        close = get_close_matches(name, TARGETS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise AcutanceError(f"there is no target {name!r}{hint}; `acutance reproduce --list` names them")
    target = TARGETS[name]
    if not target.measure:
        raise AcutanceError(f"{name} has nothing to run: {target.notes}")
    return target
