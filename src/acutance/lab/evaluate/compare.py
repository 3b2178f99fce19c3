"""compare: runs that differ in their seed only are one group; groups are compared over the seeds they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from acutance.errors import AcutanceError
from acutance.lab.evaluate.evaluate import Weights, refuse_seen
from acutance.lab.evaluate.paired import Paired, paired
from acutance.lab.evaluate.scores import ReadRun, Way, common_way, refuse_unknown_split
from acutance.lab.tasks import task_class
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.run import Run, changes

FORMAT = "acutance-comparison/1"


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, by seed."""

    label: str
    recipe: str | None
    ema: float | None  # where there is one, the weights are the running mean
    runs: Mapping[int, str]  # the folders
    scores: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(list(self.scores.values())))

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; NaN for one."""
        values = list(self.scores.values())
        return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class Comparison:
    """Groups side by side, each beside the first."""

    score: str
    split: str
    higher_is_better: bool
    way: Way
    groups: tuple[Group, ...]

    def against_first(self, group: Group) -> Paired | None:
        """The paired test over the seeds that both have; None for the first itself, or without any."""
        first = self.groups[0]
        seeds = sorted(first.scores.keys() & group.scores.keys())
        if group is first or not seeds:
            return None
        return paired([first.scores[s] for s in seeds], [group.scores[s] for s in seeds])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": FORMAT,
            "score": self.score,
            "split": self.split,
            "higher_is_better": self.higher_is_better,
            "weights": self.way.weights,
            "settings": list(self.way.settings),
            "precision": self.way.precision,
            "test": "paired sign-flip permutation over shared seeds, exact, two-sided, against the first group",
            "groups": [self._group_dict(group) for group in self.groups],
        }

    def to_markdown(self) -> str:
        """A table, and how its scores came about."""
        better = "higher is better" if self.higher_is_better else "lower is better"
        lines = [
            f"| configuration | weights | seeds | {self.score}, {self.split} ({better}) | beside the first | p |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for group in self.groups:
            test = self.against_first(group)
            cells = ("", "") if test is None else (signed(test), p_value(test))
            score = with_spread(group.mean, group.spread)
            weights = self.way.weights + ("" if group.ema is None else f", running mean {group.ema:g}")
            lines.append(f"| {group.label} | {weights} | {len(group.scores)} | {score} | {cells[0]} | {cells[1]} |")
        return "\n".join([*lines, "", f"Scores on {self.split}: {self.way}."]) + "\n"

    def _group_dict(self, group: Group) -> dict[str, Any]:
        test = self.against_first(group)
        return {
            "label": group.label,
            "recipe": group.recipe,
            "ema": group.ema,
            "runs": {str(seed): folder for seed, folder in group.runs.items()},
            "scores": {str(seed): score for seed, score in group.scores.items()},
            "mean": group.mean,
            "spread": finite(group.spread),
            "against_first": None
            if test is None
            else {"mean": test.mean, "spread": finite(test.spread), "p": test.p, "pairs": test.pairs},
        }


def compare(
    folders: Sequence[Path | str],
    *,
    split: str = "test",
    score: str | None = None,
    weights: Weights | None = None,
    settings: Sequence[str] | None = None,
) -> Comparison:
    """Group runs by configuration and compare the groups, in the order in which they are named.

    Args:
        folders: the runs; those evaluated on "test" by `evaluate_run`, of "val" the finished ones have scores.
        split: where the scores are from.
        score: which; by default the task's headline, such as top1.
        weights: last or best.
        settings: fields that were changed for the evaluation of the first run; the others' must have been read with
            the same values, changed or their own. Where weights and settings are left open, all runs must have been
            evaluated in one common way; of several, the last weights with nothing changed are taken.
    """
    if not folders:
        raise AcutanceError("name the runs to compare")
    if weights not in (None, "last", "best"):
        raise AcutanceError(f"weights are last or best, not {weights!r}")
    refuse_unknown_split(split)
    found = [ReadRun.of(Path(folder), split) for folder in folders]
    kinds = {read.kind for read in found}
    if len(kinds) > 1:
        raise AcutanceError(f"runs of different tasks cannot be compared: {', '.join(sorted(kinds))}")
    way = common_way(found, split, weights, settings)
    for read in found:
        refuse_seen(read.folder, Run(read.folder).config(), split, way.weights)
        read.refuse_outdated(way)
    task = task_class(found[0].kind)
    name = score or task.headline
    higher = task.higher_is_better if name == task.headline else name != "loss"
    return Comparison(name, split, higher, way, groups_of(found, name, way))


def groups_of(found: Sequence[ReadRun], score: str, way: Way) -> tuple[Group, ...]:
    """Runs that differ in their seed only are one group, called by what makes it different from the others."""
    grouped: dict[str, list[ReadRun]] = {}
    for read in found:
        grouped.setdefault(repr(read.essence), []).append(read)
    members = list(grouped.values())
    labels = _labels([reads[0] for reads in members])
    return tuple(_group(label, reads, score, way) for label, reads in zip(labels, members, strict=True))


def _group(label: str, reads: Sequence[ReadRun], score: str, way: Way) -> Group:
    for read in reads:
        if score not in (known := read.scored[way].scores):
            raise AcutanceError(f"{read.folder} has no {score!r}; it has {', '.join(known)}")
    seeds = [read.seed for read in reads]
    if doubled := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        same = ", ".join(str(read.folder) for read in reads if read.seed in doubled)
        raise AcutanceError(f"seed {doubled[0]} comes twice with one configuration: {same}. Leave one of them out")
    ordered = sorted(reads, key=lambda read: read.seed)
    return Group(
        label,
        reads[0].recipe,
        reads[0].essence["loop"]["ema"],
        {read.seed: str(read.folder) for read in ordered},
        {read.seed: float(read.scored[way].scores[score]) for read in ordered},
    )


def _labels(reads: Sequence[ReadRun]) -> list[str]:
    """What makes each group different from the others, and nothing else."""
    differing: dict[str, None] = {}
    for one, other in combinations(reads, 2):
        differing |= dict.fromkeys(changes(one.essence, other.essence))
    if not differing:
        return [read.recipe or read.folder.name for read in reads]
    return [", ".join(f"{_field(name)} {_value(read.essence, name)}" for name in differing) for read in reads]


def _field(name: str) -> str:
    """`mitigation`, or `weights' mitigation` of the run that a run starts from."""
    *parents, last = name.split(".")
    return "".join(f"{parent}' " for parent in parents if parent in STARTS) + last


def _value(essence: Any, name: str) -> str:
    for part in name.split("."):
        essence = essence.get(part) if isinstance(essence, Mapping) else None
    if isinstance(essence, Mapping):  # of a run that is started from: which of its files
        return str(essence["file"])
    return "none" if essence is None else str(essence)


def finite(value: float) -> float | None:
    """None in place of NaN, which JSON does not have."""
    return value if np.isfinite(value) else None


def with_spread(mean: float, spread: float, digits: int = 2) -> str:
    """`72.17 ± 0.10`, or the mean alone where there is one seed."""
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if np.isfinite(spread) else "")


def signed(test: Paired) -> str:
    """`+0.84 ± 0.10`."""
    return f"{test.mean:+.2f}" + (f" ± {test.spread:.2f}" if np.isfinite(test.spread) else "")


def p_value(test: Paired) -> str:
    """To three digits, with a word where no smaller one was possible."""
    note = " (the least so few pairs can give)" if np.isclose(test.p, test.smallest_p) else ""
    return f"{test.p:.3g}{note}"
