"""compare, for robustness: the tables of several runs, cell by cell over the seeds they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.io.saving import load
from acutance.lab.evaluate.compare import Comparison, EvaluationSettings, ScoredRun, check_request, groups_of, markdown
from acutance.lab.evaluate.evaluate import Weights, refuse_seen, weights_file
from acutance.lab.robustness import RobustnessTable
from acutance.lab.robustness.evaluate import weights_digest
from acutance.lab.train.run import Run

FORMAT = "acutance-robustness-comparison/1"
# What a table's numbers depend on, beside the weights and the precision.
FIELDS = ("data", "images", "pixels", "corruptions", "seed")


@dataclass(frozen=True)
class RobustnessComparison:
    """Groups of runs side by side, by what was measured: `clean`, `fog`, `severity 3`, `fog:3`."""

    comparisons: Mapping[str, Comparison]
    shown: tuple[str, ...]  # of these, in the table

    def to_markdown(self) -> str:
        """A line for each attack, corruption and severity; single cells are in the JSON."""
        first = self.comparisons[self.shown[0]]
        header, *others = ([f"{group.label}, seeds: {len(group.scores)}"] for group in first.groups)
        header = ["top-1, %", *header, *(cell for other in others for cell in (*other, "beside the first", "p"))]
        rows = []
        for name in self.shown:
            found = self.comparisons[name]
            alone, *beside = (found.cells(group) for group in found.groups)
            rows.append([name, alone[0], *(cell for cells in beside for cell in cells)])
        about = f"On {first.split}: {first.settings}. Attacks are L∞, ε in levels of 255."
        return f"{markdown([header, ['---'] * len(header), *rows])}\n{about}\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, with every cell and every seed."""
        return {"format": FORMAT, "comparisons": {name: found.to_dict() for name, found in self.comparisons.items()}}


def compare_robustness(
    folders: Sequence[Path | str], *, split: str = "test", score: str | None = None, weights: Weights = "last"
) -> list[RobustnessComparison]:
    """Group runs by configuration and compare what `acutance robustness` measured of them.

    There is one comparison for each way in which all runs were measured: with drawn corruptions, with published files.
    `score` is one cell or mean alone, such as `fog:3`, `fog` or `severity 3`.
    """
    check_request(folders, split, weights)
    tables = {Path(folder): _tables(Path(folder), split, weights) for folder in folders}
    first = next(iter(tables.values()))
    shared = [settings for settings in first if all(settings in found for found in tables.values())]
    if not shared:
        listed = "; ".join(f"{folder}: {' / '.join(map(str, found))}" for folder, found in tables.items())
        raise AcutanceError(f"these runs were not measured in one common way ({listed}): use the same options for all")
    return [_compared({folder: found[s] for folder, found in tables.items()}, s, split, score) for s in shared]


def _tables(folder: Path, split: str, weights: Weights) -> dict[EvaluationSettings, RobustnessTable]:
    refuse_seen(folder, Run(folder).config(), split, weights)
    found: dict[EvaluationSettings, RobustnessTable] = {}
    for path in sorted(folder.glob("robustness*.json")):
        table = RobustnessTable.load(path)
        context = table.context
        if (context.get("split"), context.get("which")) == (split, weights):
            fields = tuple(f"{key}={context[key]}" for key in FIELDS)
            found[EvaluationSettings(weights, fields, str(context["dtype"]))] = table
    if not found:
        raise AcutanceError(
            f"{folder} has no robustness on {split!r} with the {weights} weights: acutance robustness {folder}"
        )
    file = weights_file(folder, weights)
    if file.is_file() and any(t.context["weights"] != weights_digest(load(file)) for t in found.values()):
        raise AcutanceError(f"{folder} went on after its robustness was measured: measure it again")
    return found


def _compared(
    tables: Mapping[Path, RobustnessTable], settings: EvaluationSettings, split: str, score: str | None
) -> RobustnessComparison:
    (folder, first), *others = tables.items()
    for other, table in others:  # or a mean would be over other cells
        if differing := sorted(first.cells.keys() ^ table.cells.keys()):
            lacking = other if differing[0] in first.cells else folder
            raise AcutanceError(f"{lacking} lacks {', '.join(differing)}: measure all runs with the same options")
    runs = [
        replace(ScoredRun.read(place, split), scores={settings: {**table.cells, **table.summary()}})
        for place, table in tables.items()
    ]
    shown = tuple(first.summary()) if score is None else (score,)
    names = [*shown, *first.cells] if score is None else shown
    comparisons = {name: Comparison(name, split, True, settings, groups_of(runs, name, settings)) for name in names}
    return RobustnessComparison(comparisons, shown)
