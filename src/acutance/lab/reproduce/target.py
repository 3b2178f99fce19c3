"""A table or figure as data, and its page: measured numbers beside published ones, as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from acutance.lab.evaluate.statistics import spread_of, with_spread
from acutance.lab.files import finite
from acutance.report.tables import markdown

if TYPE_CHECKING:
    from acutance.lab.reproduce.run import Session

FORMAT = "acutance-reproduction/1"
# A published number, with its spread over seeds if the paper gives one.
Published = float | tuple[float, float]
PAPERS = {"neutreno": "2312.00751", "oversmoothing": "2401.04301"}


@dataclass(frozen=True)
class Training:
    """A run that targets need: a recipe and changed fields. Targets share runs by name."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()  # as --set takes them
    base: Training | None = None  # the training it starts from
    start: str = "weights"  # the task's field that takes the base's weights

    def vary(self, suffix: str, *changes: str) -> Training:
        """The same recipe with further changes."""
        return Training(f"{self.name}-{suffix}", self.recipe, (*self.changes, *changes))


@dataclass(frozen=True)
class Row:
    """One model of a table, or one curve of a figure, and its published numbers."""

    label: str
    training: Training | None = None
    published: Mapping[str, Published] = field(default_factory=dict)  # by column
    state: Literal["trained", "initial"] = "trained"  # initial: before any step
    model: str | None = None  # a pretrained model instead of a training, as `acutance measure` takes it


@dataclass(frozen=True)
class Target:
    """A table or figure."""

    name: str
    title: str
    measure: Callable[[Session], list[Sheet]] | None  # None: there is nothing to run
    rows: tuple[Row, ...] = ()
    needs: str = ""  # data and compute
    notes: str = ""  # what the paper leaves open, and what was chosen
    seeds: int = 3

    @property
    def paper(self) -> str:
        """Its arXiv number."""
        return PAPERS[self.name.partition("-")[0]]


@dataclass(frozen=True)
class Line:
    """One model: what was measured, by column and seed, and what was published."""

    label: str
    measured: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""  # why something is missing, or which pictures were drawn

    def mean_and_spread(self, column: str) -> tuple[float, float] | None:
        """The mean and spread over seeds; the spread of one seed is NaN."""
        values = list(self.measured.get(column, {}).values())
        return (float(np.mean(values)), spread_of(values)) if values else None


@dataclass(frozen=True)
class Sheet:
    """A table. A figure is a table with a column for each layer."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    digits: int = 2

    def transposed(self, title: str) -> Sheet:
        """Lines and columns exchanged, without published numbers."""
        lines = [Line(name, {line.label: line.measured.get(name, {}) for line in self.lines}) for name in self.columns]
        return Sheet(title, [line.label for line in self.lines], lines, self.digits)

    def to_markdown(self) -> str:
        """A table in which each published column comes before the measured one."""
        printed = {column for line in self.lines for column in line.published}
        header, rows = ["model"], [[line.label] for line in self.lines]
        for column in self.columns:
            header += [f"{column}, published", f"{column}, measured"] if column in printed else [column]
            for cells, line in zip(rows, self.lines, strict=True):
                cells += [_published(line.published.get(column))] if column in printed else []
                found = line.mean_and_spread(column)
                cells.append("–" if found is None else with_spread(*found, self.digits))
        if any(line.note for line in self.lines):
            header.append("")
            rows = [[*cells, line.note] for cells, line in zip(rows, self.lines, strict=True)]
        return markdown(header, rows)

    def to_dict(self) -> dict[str, Any]:
        rows, unknown = [], (float("nan"), float("nan"))
        for line in self.lines:
            measured = {}
            for column in (column for column in self.columns if column in line.measured):
                mean, spread = line.mean_and_spread(column) or unknown
                measured[column] = {"mean": mean, "spread": spread, "by_seed": dict(line.measured[column])}
            numbers = {name: value if isinstance(value, tuple) else (value,) for name, value in line.published.items()}
            published = {name: dict(zip(("mean", "spread"), value, strict=False)) for name, value in numbers.items()}
            rows.append({"label": line.label, "note": line.note, "published": published, "measured": measured})
        return {"title": self.title, "columns": list(self.columns), "rows": rows}


@dataclass(frozen=True)
class Result:
    """A target's sheets, and how they were made."""

    target: Target
    seeds: int
    sheets: tuple[Sheet, ...]
    pending: tuple[str, ...]  # runs that are not finished
    record: Mapping[str, Any]  # versions, hardware, command

    def to_markdown(self) -> str:
        parts = [f"## {self.target.title}\n"]
        for sheet in self.sheets:
            parts += [*([f"### {sheet.title}\n"] if len(self.sheets) > 1 else []), sheet.to_markdown()]
        spread = f"mean ± standard deviation over {self.seeds} seeds" if self.seeds > 1 else "one seed"
        parts.append(f"arXiv {self.target.paper}. Measured: {spread}. {self.target.notes}".rstrip() + "\n")
        if changed := self.record.get("changes"):
            parts.append(f"Changed in every run that has the field: {', '.join(changed)}.\n")
        if self.pending:
            parts.append(f"Not finished yet: {', '.join(self.pending)}.\n")
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        about = {name: getattr(self.target, name) for name in ("title", "paper", "notes")}
        sheets = [sheet.to_dict() for sheet in self.sheets]
        found = {"seeds": self.seeds, "pending": list(self.pending), "sheets": sheets}
        body: dict[str, Any] = finite({"format": FORMAT, "target": self.target.name, **about, **found, **self.record})
        return body


def _published(value: Published | None) -> str:
    return "–" if value is None else " ± ".join(map(str, value if isinstance(value, tuple) else (value,)))
