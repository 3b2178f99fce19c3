"""compare: runs that differ only in their seed form a group. Groups are compared over the seeds they share."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Self

import numpy as np

from acutance.errors import AcutanceError
from acutance.io.saving import load
from acutance.lab.evaluate import evaluate as evaluation
from acutance.lab.evaluate.evaluate import SPLITS, Weights, changed_settings, weights_file
from acutance.lab.evaluate.statistics import Paired, paired, spread_of, with_spread
from acutance.lab.files import digest, finite
from acutance.lab.robustness import RobustnessTable
from acutance.lab.robustness.evaluate import weights_digest
from acutance.lab.tasks import task_class
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.config import Config
from acutance.lab.train.run import Run, changes, config_without_incidentals, shown
from acutance.report.tables import markdown

FORMAT, ROBUSTNESS_FORMAT = "acutance-comparison/1", "acutance-robustness-comparison/1"
# What a table of robustness depends on, beside the weights and the precision.
FIELDS = ("data", "images", "pixels", "corruptions", "seed")


@dataclass(frozen=True)
class EvaluationSettings:
    """How scores were computed. Scores with different settings are never compared."""

    weights: Weights
    fields: tuple[str, ...]  # all fields the scores depend on, changed for the evaluation or the run's own
    precision: str

    def __str__(self) -> str:
        return ", ".join([f"{self.weights} weights", *self.fields, self.precision])


@dataclass(frozen=True)
class ScoredRun:
    """A run with all its scores on a split, by settings."""

    folder: Path
    own: Config
    config: dict[str, Any]  # the same without incidental fields
    plain: EvaluationSettings  # of an evaluation that changes nothing
    scores: Mapping[EvaluationSettings, Mapping[str, float]]
    models: Mapping[EvaluationSettings, str]  # checksums of the weights; none for scores from training

    @classmethod
    def read(cls, folder: Path, split: str) -> Self:
        """Read its record and its evaluations; on the held-out slice also the scores from training."""
        run = Run(folder)
        config = run.config()
        plain = EvaluationSettings("last", evaluation.evaluated_with(config, split), "float32")
        found = {
            EvaluationSettings(e.weights, _overlaid(plain.fields, e.settings), e.precision): e
            for e in evaluation.read_evaluations(folder, split)
        }
        scores = {settings: e.scores for settings, e in found.items()}
        if split == "val" and (result := run.result()) is not None:
            scores[replace(plain, precision=f"{config.loop.precision} in training")] = result["scores"]
        models = {settings: e.model for settings, e in found.items()}
        return cls(folder, config, config_without_incidentals(run), plain, scores, models)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, by seed."""

    label: str
    recipe: str | None
    ema: float | None  # if there is one, the weights are the running mean
    runs: Mapping[int, str]  # the folders
    scores: Mapping[int, float]
    against_first: Paired | None  # over the seeds that both have; None for the first itself, or without such seeds

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.scores.values())))

    @property
    def spread(self) -> float:
        return spread_of(list(self.scores.values()))

    @property
    def cells(self) -> list[str]:
        """For example `72.17 ± 0.10`, the difference from the first `+0.84 ± 0.10`, and p."""
        score, test = with_spread(self.mean, self.spread), self.against_first
        if test is None:
            return [score, "", ""]
        note = " (the least that so few pairs can give)" if np.isclose(test.p, test.smallest_p) else ""
        return [score, ("+" if test.mean >= 0 else "") + with_spread(test.mean, test.spread), f"{test.p:.3g}{note}"]


@dataclass(frozen=True)
class Comparison:
    """Groups, each compared with the first."""

    score: str
    split: str
    higher_is_better: bool
    settings: EvaluationSettings
    groups: tuple[Group, ...]

    def to_dict(self) -> dict[str, Any]:
        how = self.settings
        about = {"score": self.score, "split": self.split, "higher_is_better": self.higher_is_better}
        about |= {"weights": how.weights, "settings": list(how.fields), "precision": how.precision}
        about["test"] = "paired sign-flip permutation over shared seeds, exact, two-sided, against the first group"
        groups = [{**asdict(group), "mean": group.mean, "spread": group.spread} for group in self.groups]
        body: dict[str, Any] = finite({"format": FORMAT, **about, "groups": groups})
        return body

    def to_markdown(self) -> str:
        """A table, and how its scores were computed."""
        better = "higher is better" if self.higher_is_better else "lower is better"
        score = f"{self.score}, {self.split} ({better})"
        columns, rows = ("configuration", "weights", "seeds", score, "beside the first", "p"), []
        for group in self.groups:
            weights = self.settings.weights + ("" if group.ema is None else f", running mean {group.ema:g}")
            rows.append([group.label, weights, str(len(group.scores)), *group.cells])
        return f"{markdown(columns, rows)}\nScores on {self.split}: {self.settings}.\n"


def compare(
    folders: Sequence[Path | str],
    *,
    split: str = "test",
    score: str | None = None,
    weights: Weights | None = None,
    settings: Sequence[str] | None = None,
) -> Comparison:
    """Group runs by configuration and compare the groups, in the order in which they are named.

    Scores on "test" come from `evaluate_run`; on "val" finished runs have scores from training. `score` defaults to the
    task's headline. `settings` are fields that were changed for the evaluation of the first run; the other runs must
    have been evaluated with the same values, changed or their own. Without weights and settings, all runs must share
    one way of evaluation; if they share several, the last weights with nothing changed are taken.
    """
    runs = _read(folders, split, weights)
    kind, *others = sorted({run.own.task.kind for run in runs})
    if others:
        raise AcutanceError(f"runs of different tasks cannot be compared: {', '.join([kind, *others])}")
    shared = _shared_settings(runs, split, weights, settings)
    for run in runs:
        expected, file = run.models.get(shared), weights_file(run.folder, shared.weights, split)
        if expected is not None and file.is_file() and digest(file) != expected:
            raise AcutanceError(f"{run.folder} was trained further after it was evaluated: evaluate it again")
    task = task_class(kind)
    name = score or task.headline
    higher = task.higher_is_better if name == task.headline else name != "loss"
    return Comparison(name, split, higher, shared, groups_of(runs, name, shared))


def _read(folders: Sequence[Path | str], split: str, weights: Weights | None) -> list[ScoredRun]:
    """The runs. Refuses a split or weights for which they can have no scores."""
    if not folders:
        raise AcutanceError("name the runs to compare")
    if split not in SPLITS:
        raise AcutanceError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    for folder in folders:
        weights_file(Path(folder), weights or "last", split)
    return [ScoredRun.read(Path(folder), split) for folder in folders]


def _shared_settings(
    runs: Sequence[ScoredRun], split: str, weights: Weights | None, settings: Sequence[str] | None
) -> EvaluationSettings:
    """The settings with which all runs were scored."""
    for run in runs:
        if not run.scores:
            older, advice = run.folder / f"evaluation-{split}.json", f"acutance evaluate {run.folder} --split {split}"
            if Run(run.folder).result() is None:
                advice = f"it is not finished. {Run(run.folder).how_to_go_on()}"
            elif older.is_file():
                advice = f"{older.name} was written by an earlier version, evaluate again with {advice}"
            raise AcutanceError(f"{run.folder} has no scores on {split!r}: {advice}")
    first, wanted = runs[0], None
    if settings is not None:
        wanted = _overlaid(first.plain.fields, changed_settings(first.folder, split, settings))
    in_all, listed = _in_all({run.folder: run.scores for run in runs})
    shared = [s for s in in_all if weights in (None, s.weights) and wanted in (None, s.fields)]
    if len(shared) == 1:
        return shared[0]
    if first.plain in shared and all(run.plain == first.plain for run in runs):
        return first.plain
    number, advice = "no", "evaluate them with the same options"
    if shared:
        number, advice = "several sets of", "choose one with --weights and --set"
    raise AcutanceError(f"{number} scores on {split!r} were computed in the same way in all runs ({listed}): {advice}")


def _in_all(found: Mapping[Path, Mapping[EvaluationSettings, Any]]) -> tuple[list[EvaluationSettings], str]:
    """The settings that all runs share, and for a message the settings of each run."""
    listed = "; ".join(f"{folder}: {' / '.join(map(str, has))}" for folder, has in found.items())
    first = next(iter(found.values()))
    return [settings for settings in first if all(settings in has for has in found.values())], listed


def _overlaid(own: Sequence[str], settings: Sequence[str]) -> tuple[str, ...]:
    """A run's own `name=value` words for what its scores depend on, with the changed ones replaced."""
    changed = {word.partition("=")[0]: word for word in settings}
    return tuple(changed.get(word.partition("=")[0], word) for word in own)


def groups_of(runs: Sequence[ScoredRun], score: str, settings: EvaluationSettings) -> tuple[Group, ...]:
    """Runs that differ only in their seed form a group. Its label says how it differs from the other groups."""
    grouped: dict[str, dict[int, ScoredRun]] = {}
    for run in runs:
        if score not in (known := run.scores[settings]):
            raise AcutanceError(f"{run.folder} has no {score!r}; it has {', '.join(known)}")
        members, seed = grouped.setdefault(repr(run.config), {}), run.own.loop.seed
        if (other := members.setdefault(seed, run)) is not run:
            same = f"{other.folder}, {run.folder}"
            raise AcutanceError(f"seed {seed} comes twice with one configuration: {same}. Leave one out")
    firsts = [next(iter(members.values())) for members in grouped.values()]
    # The fields in which any two groups differ, and no others.
    pairs = combinations([run.config for run in firsts], 2)
    differing = dict.fromkeys(name for one, other in pairs for name in changes(one, other))
    groups: list[Group] = []
    for first, members in zip(firsts, grouped.values(), strict=True):
        recipe, by_seed = Run(first.folder).record()["recipe"], dict(sorted(members.items()))
        label = ", ".join(_labelled(first.config, name) for name in differing)
        folders = {seed: str(run.folder) for seed, run in by_seed.items()}
        scores = {seed: float(run.scores[settings][score]) for seed, run in by_seed.items()}
        both = [(groups[0].scores[seed], x) for seed, x in scores.items() if groups and seed in groups[0].scores]
        test = paired(*zip(*both, strict=True)) if both else None
        groups.append(Group(label or recipe or first.folder.name, recipe, first.own.loop.ema, folders, scores, test))
    return tuple(groups)


def _labelled(value: Any, name: str) -> str:
    """`mitigation none`, or `weights' mitigation none` for the run that a run starts from."""
    *parents, last = parts = name.split(".")
    for part in parts:
        value = value.get(part) if isinstance(value, Mapping) else None
    value = value["file"] if isinstance(value, Mapping) else value  # initial weights: their file
    return "".join(f"{parent}' " for parent in parents if parent in STARTS) + f"{last} {shown(value)}"


@dataclass(frozen=True)
class RobustnessComparison:
    """A comparison of groups for each measurement: `clean`, `fog`, `severity 3`, `fog:3`."""

    comparisons: Mapping[str, Comparison]
    shown: tuple[str, ...]  # those in the table

    def to_markdown(self) -> str:
        """A line for each attack, corruption and severity. Single cells are only in the JSON."""
        first = self.comparisons[self.shown[0]]
        heads = [[f"{group.label}, seeds: {len(group.scores)}", "beside the first", "p"] for group in first.groups]
        found = [(name, [group.cells for group in self.comparisons[name].groups]) for name in self.shown]
        rows = [[name, *chain.from_iterable(cells)] for name, cells in [("top-1, %", heads), *found]]
        columns, *rows = [[*row[:2], *row[4:]] for row in rows]  # the first group is not compared with itself
        about = f"On {first.split}: {first.settings}. Attacks are L∞, ε in levels of 255."
        return f"{markdown(columns, rows)}\n{about}\n"

    def to_dict(self) -> dict[str, Any]:
        comparisons = {name: found.to_dict() for name, found in self.comparisons.items()}
        return {"format": ROBUSTNESS_FORMAT, "comparisons": comparisons}


def compare_robustness(
    folders: Sequence[Path | str], *, split: str = "test", score: str | None = None, weights: Weights | None = None
) -> list[RobustnessComparison]:
    """Group runs by configuration and compare their results of `acutance robustness`.

    There is one comparison for each way in which all runs were measured: with drawn corruptions, with published files.
    `score` selects one cell or mean, such as `fog:3`, `fog` or `severity 3`.
    """
    weights = weights or "last"
    runs = _read(folders, split, weights)
    measured = {run.folder: _tables(run.folder, split, weights) for run in runs}
    shared, listed = _in_all(measured)
    if not shared:
        raise AcutanceError(f"these runs were not measured in one common way ({listed}): use the same options for all")
    found = []
    for settings in shared:
        scored, first = [], measured[runs[0].folder][settings]
        for run in runs:
            table = measured[run.folder][settings]
            if differing := sorted(first.cells.keys() ^ table.cells.keys()):  # means would be over different cells
                lacking = (run if differing[0] in first.cells else runs[0]).folder
                raise AcutanceError(f"{lacking} lacks {', '.join(differing)}: measure all runs with the same options")
            scored.append(replace(run, scores={settings: {**table.cells, **table.summary()}}))
        lines = tuple(first.summary()) if score is None else (score,)
        names = [*lines, *first.cells] if score is None else lines
        groups = {name: groups_of(scored, name, settings) for name in names}
        comparisons = {name: Comparison(name, split, True, settings, own) for name, own in groups.items()}
        found.append(RobustnessComparison(comparisons, lines))
    return found


def _tables(folder: Path, split: str, weights: Weights) -> dict[EvaluationSettings, RobustnessTable]:
    found: dict[EvaluationSettings, RobustnessTable] = {}
    for path in sorted(folder.glob("robustness*.json")):
        table = RobustnessTable.load(path)
        context = table.context
        if (context.get("split"), context.get("which")) == (split, weights):
            fields = tuple(f"{key}={context[key]}" for key in FIELDS)
            found[EvaluationSettings(weights, fields, str(context["dtype"]))] = table
    if not found:
        raise AcutanceError(
            f"{folder} has no robustness on {split!r} with the {weights} weights: run acutance robustness {folder}"
        )
    file = weights_file(folder, weights, split)
    if file.is_file() and any(t.context["weights"] != weights_digest(load(file)) for t in found.values()):
        raise AcutanceError(f"{folder} was trained further after its robustness was measured: measure it again")
    return found
