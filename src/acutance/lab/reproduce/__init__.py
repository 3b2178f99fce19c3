"""Every table and figure of the two papers behind one command: the runs it needs, what is read, what was published."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from acutance.errors import AcutanceError
from acutance.lab.reproduce import neutreno, oversmoothing
from acutance.lab.reproduce.target import Row, Target, Training

__all__ = ["TARGETS", "Row", "Target", "Training", "find"]

TARGETS: Mapping[str, Target] = {target.name: target for target in (*neutreno.TARGETS, *oversmoothing.TARGETS)}


def find(name: str) -> Target:
    """A target that can be run."""
    if name not in TARGETS:
        close = get_close_matches(name, TARGETS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise AcutanceError(f"there is no target {name!r}{hint}; `acutance reproduce --list` names them")
    target = TARGETS[name]
    if target.measure is None:
        raise AcutanceError(f"{name} has nothing to run: {target.notes}")
    return target
