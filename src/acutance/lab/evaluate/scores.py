"""What runs have been scored with, and in which way: only what came about in one way is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.files.atomic import digest
from acutance.lab.evaluate.evaluate import SPLITS, Weights, read_evaluations, read_with, resolved_settings, weights_file
from acutance.lab.train.config import Config
from acutance.lab.train.initial_weights import config_without_incidentals
from acutance.lab.train.run import Run


@dataclass(frozen=True)
class Way:
    """How a score came about. Scores that came about in different ways are never put side by side."""

    weights: Weights
    settings: tuple[str, ...]  # all fields that the scores depend on, changed for the evaluation or the run's own
    precision: str

    def __str__(self) -> str:
        return ", ".join([f"{self.weights} weights", *self.settings, self.precision])


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
    plain: Way  # of an evaluation in which nothing is changed
    scored: Mapping[Way, Scored]

    @classmethod
    def of(cls, folder: Path, split: str) -> ReadRun:
        """Read its record and all its scores on a split."""
        run = Run(folder)
        config = run.config()
        plain = Way("last", read_with(config, split), "float32")
        scored = _scored(run, config, split, plain)
        return cls(
            folder, run.recipe(), config.task.kind, config.loop.seed, config_without_incidentals(run), plain, scored
        )

    def refuse_outdated(self, way: Way) -> None:
        """A run that went on has other weights than those that were scored."""
        expected, file = self.scored[way].model, weights_file(self.folder, way.weights)
        if expected is not None and file.is_file() and digest(file) != expected:
            raise AcutanceError(f"{self.folder} went on after it was evaluated: evaluate it again")


def refuse_unknown_split(split: str) -> None:
    """Of which no run could ever have scores."""
    if split not in SPLITS:
        raise AcutanceError(f"no split {split!r}; there are {', '.join(SPLITS)}")


def _scored(run: Run, config: Config, split: str, plain: Way) -> dict[Way, Scored]:
    """What a run has by the way it came about; on the held-out slice also what training itself found."""
    found = {
        Way(e.weights, _overlaid(plain.settings, e.settings), e.precision): Scored(e.scores, e.model)
        for e in read_evaluations(run.folder, split)
    }
    result = run.result() if split == "val" else None
    if result is not None:
        found[replace(plain, precision=f"{config.loop.precision} in training")] = Scored(result["scores"])
    return found


def common_way(reads: Sequence[ReadRun], split: str, weights: Weights | None, settings: Sequence[str] | None) -> Way:
    """The one in which all runs were scored."""
    for read in reads:
        if not read.scored:
            raise AcutanceError(
                f"{read.folder} has no scores on {split!r}: {_how_to_get_them(Run(read.folder), split)}"
            )
    first = reads[0]
    wanted = None
    if settings is not None:
        wanted = _overlaid(first.plain.settings, resolved_settings(first.folder, split, settings))
    common = [
        way
        for way in first.scored
        if all(way in read.scored for read in reads)
        and weights in (None, way.weights)
        and wanted in (None, way.settings)
    ]
    if len(common) == 1:
        return common[0]
    if first.plain in common and all(read.plain == first.plain for read in reads):
        return first.plain
    listed = "; ".join(f"{read.folder}: {' / '.join(map(str, read.scored))}" for read in reads)
    advice = "choose one with --weights and --set" if common else "evaluate them with the same options"
    raise AcutanceError(
        f"{'several sets of' if common else 'no'} scores on {split!r} came about in the same way in all of these runs "
        f"({listed}): {advice}"
    )


def _overlaid(own: Sequence[str], settings: Sequence[str]) -> tuple[str, ...]:
    """A run's own `name=value` for all that its scores depend on, with what was changed in its place."""
    changed = {word.partition("=")[0]: word for word in settings}
    return tuple(changed.get(word.partition("=")[0], word) for word in own)


def _how_to_get_them(run: Run, split: str) -> str:
    if run.result() is None:
        return f"it is not finished. {run.how_to_go_on()}"
    older = run.folder / f"evaluation-{split}.json"
    why = f"{older.name} was written by an earlier version, evaluate again with " if older.is_file() else ""
    return f"{why}acutance evaluate {run.folder} --split {split}"
