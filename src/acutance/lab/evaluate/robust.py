"""compare, for robustness: the tables of several runs, cell by cell over the seeds they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.io.saving import load
from acutance.lab.evaluate.compare import Comparison, groups_of, p_value, signed, with_spread
from acutance.lab.evaluate.evaluate import Weights, refuse_seen, weights_file
from acutance.lab.evaluate.scores import ReadRun, Scored, Way, refuse_unknown_split
from acutance.lab.robustness import RobustnessTable
from acutance.lab.robustness.evaluate import weights_digest
from acutance.lab.train.run import Run

FORMAT = "acutance-robustness-comparison/1"
# What numbers of a table depend on, beside the weights and the precision: what it holds of the images and the draws.
WAY = ("data", "images", "pixels", "corruptions", "seed")


@dataclass(frozen=True)
class RobustnessComparison:
    """Groups of runs side by side, by what was measured: `clean`, `fog`, `severity 3`, `fog:3`."""

    comparisons: Mapping[str, Comparison]
    shown: tuple[str, ...]  # of these, in the table

    def to_markdown(self) -> str:
        """A line for each attack, corruption and severity; single cells are in the JSON."""
        first = self.comparisons[self.shown[0]]
        header = ["top-1, %", *(f"{group.label}, seeds: {len(group.scores)}" for group in first.groups[:1])]
        for group in first.groups[1:]:
            header += [f"{group.label}, seeds: {len(group.scores)}", "beside the first", "p"]
        rows = [[name, *self._cells(self.comparisons[name])] for name in self.shown]
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
        return "\n".join([*lines, "", f"On {first.split}: {first.way}. Attacks are L∞, ε in levels of 255."]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, with every cell and every seed."""
        return {
            "format": FORMAT,
            "comparisons": {name: comparison.to_dict() for name, comparison in self.comparisons.items()},
        }

    def _cells(self, comparison: Comparison) -> list[str]:
        cells: list[str] = []
        for group in comparison.groups:
            cells.append(with_spread(group.mean, group.spread))
            if group is not comparison.groups[0]:
                test = comparison.against_first(group)
                cells += ["", ""] if test is None else [signed(test), p_value(test)]
        return cells


def compare_robustness(
    folders: Sequence[Path | str], *, split: str = "test", score: str | None = None, weights: Weights = "last"
) -> list[RobustnessComparison]:
    """Group runs by configuration and compare what `acutance robustness` measured of them.

    Args:
        folders: the runs.
        split: on which they were measured.
        score: one cell or mean alone, such as `fog:3`, `fog` or `severity 3`.
        weights: the last or the best.

    Returns:
        One comparison for each way in which all runs were measured: with drawn corruptions, with published files.
    """
    if not folders:
        raise AcutanceError("name the runs to compare")
    refuse_unknown_split(split)
    tables = {Path(folder): _tables(Path(folder), split, weights) for folder in folders}
    first = next(iter(tables.values()))
    common = [way for way in first if all(way in found for found in tables.values())]
    if not common:
        listed = "; ".join(f"{folder}: {' / '.join(map(str, found))}" for folder, found in tables.items())
        raise AcutanceError(f"these runs were not measured in one common way ({listed}): use the same options for all")
    return [_compared({folder: found[way] for folder, found in tables.items()}, way, split, score) for way in common]


def _tables(folder: Path, split: str, weights: Weights) -> dict[Way, RobustnessTable]:
    """A run's tables, by the way in which they came about."""
    refuse_seen(folder, Run(folder).config(), split, weights)
    found: dict[Way, RobustnessTable] = {}
    for path in sorted(folder.glob("robustness*.json")):
        table = RobustnessTable.load(path)
        context = table.context
        if (context.get("split"), context.get("which")) == (split, weights):
            way = Way(weights, tuple(f"{key}={context[key]}" for key in WAY), str(context["dtype"]))
            found[way] = table
    if not found:
        raise AcutanceError(
            f"{folder} has no robustness on {split!r} with the {weights} weights: acutance robustness {folder}"
        )
    file = weights_file(folder, weights)
    if file.is_file() and any(t.context["weights"] != weights_digest(load(file)) for t in found.values()):
        raise AcutanceError(f"{folder} went on after its robustness was measured: measure it again")
    return found


def _compared(tables: Mapping[Path, RobustnessTable], way: Way, split: str, score: str | None) -> RobustnessComparison:
    (folder, first), *others = tables.items()
    for other, table in others:  # or a mean would be over other cells
        if differing := sorted(first.cells.keys() ^ table.cells.keys()):
            lacking = other if differing[0] in first.cells else folder
            raise AcutanceError(f"{lacking} lacks {', '.join(differing)}: measure all runs with the same options")
    reads = [
        replace(ReadRun.of(place, split), scored={way: Scored({**table.cells, **table.summary()})})
        for place, table in tables.items()
    ]
    names = [score] if score is not None else [*first.summary(), *first.cells]
    comparisons = {name: Comparison(name, split, True, way, groups_of(reads, name, way)) for name in names}
    return RobustnessComparison(comparisons, (score,) if score is not None else tuple(first.summary()))
