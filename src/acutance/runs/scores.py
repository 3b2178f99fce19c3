"""What runs have been scored with, and in which way: only what came about in one way is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.files import digest
from acutance.runs.evaluate import Weights, read_evaluations, resolved_settings, weights_file
from acutance.train.run import INCIDENTAL, STARTS, Run


@dataclass(frozen=True)
class Way:
    """How a score came about. Scores that came about in different ways are never put side by side."""

    weights: Weights = "last"
    settings: tuple[str, ...] = ()  # fields that were changed for the evaluation
    precision: str = "float32"

    def __str__(self) -> str:
        changed = ", ".join(self.settings) or "nothing changed"
        return f"{self.weights} weights, {changed}, {self.precision}"


@dataclass(frozen=True)
class Scored:
    """Scores, and of which weights."""

    scores: Mapping[str, float]
    model: str | None = None  # a checksum of the weights; None where training itself scored them


@dataclass(frozen=True)
class ReadRun:
    """A run as far as comparing goes."""

    folder: Path
    recipe: str | None
    kind: str
    seed: int
    essence: dict[str, Any]  # the configuration without what is incidental
    scored: Mapping[Way, Scored]

    @classmethod
    def of(cls, folder: Path, split: str) -> ReadRun:
        """Read its record and all its scores on a split."""
        run = Run(folder)
        plain = run.config().to_dict()
        essence = {  # each seed may start from a run of its own: what counts is whether it does
            part: {n: bool(v) if n in STARTS else v for n, v in content.items() if n not in INCIDENTAL.get(part, ())}
            for part, content in plain.items()
        }
        return cls(folder, run.recipe(), plain["task"]["kind"], plain["loop"]["seed"], essence, _scored(run, split))

    def refuse_outdated(self, way: Way) -> None:
        """A run that went on has other weights than those that were scored."""
        expected, file = self.scored[way].model, weights_file(self.folder, way.weights)
        if expected is not None and file.is_file() and digest(file) != expected:
            raise AcutanceError(f"{self.folder} went on after it was evaluated: evaluate it again")


def _scored(run: Run, split: str) -> dict[Way, Scored]:
    """What a run has by the way it came about; on the held-out slice also what training itself found."""
    found = {
        Way(e.weights, e.settings, e.precision): Scored(e.scores, e.model) for e in read_evaluations(run.folder, split)
    }
    result = run.result() if split == "val" else None
    if result is not None:
        found[Way(precision=f"{run.config().loop.precision} in training")] = Scored(result["scores"])
    return found


def common_way(reads: Sequence[ReadRun], split: str, weights: Weights | None, settings: Sequence[str] | None) -> Way:
    """The one in which all runs were scored."""
    for read in reads:
        if not read.scored:
            raise AcutanceError(
                f"{read.folder} has no scores on {split!r}: {_how_to_get_them(Run(read.folder), split)}"
            )
    wanted = None if settings is None else resolved_settings(reads[0].folder, settings)
    common = [
        way
        for way in reads[0].scored
        if all(way in read.scored for read in reads)
        and weights in (None, way.weights)
        and wanted in (None, way.settings)
    ]
    if len(common) == 1:
        return common[0]
    if Way() in common:
        return Way()
    listed = "; ".join(f"{read.folder}: {' / '.join(map(str, read.scored))}" for read in reads)
    advice = "choose one with --weights and --set" if common else "evaluate them with the same options"
    raise AcutanceError(
        f"{'several sets of' if common else 'no'} scores on {split!r} came about in the same way in all of these runs "
        f"({listed}): {advice}"
    )


def _how_to_get_them(run: Run, split: str) -> str:
    if run.result() is None:
        return f"it is not finished. {run.how_to_go_on()}"
    return f"acutance evaluate {run.folder} --split {split}"
