"""Measured numbers beside published ones, as Markdown and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from acutance.files.atomic import finite
from acutance.lab.evaluate.compare import with_spread
from acutance.lab.reproduce.target import Published, Target

FORMAT = "acutance-reproduction/1"


@dataclass(frozen=True)
class Line:
    """One model: what was measured, by column and seed, and what was published."""

    label: str
    measured: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""  # why something is missing, or which pictures were drawn

    def mean_and_spread(self, column: str) -> tuple[float, float] | None:
        """Over seeds; the spread of one seed is NaN."""
        values = list(self.measured.get(column, {}).values())
        if not values:
            return None
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class Sheet:
    """A table; a figure is a table with a column for each layer."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    digits: int = 2

    def transposed(self, title: str) -> Sheet:
        """A line for each column, a column for each line."""
        lines = [Line(name, {line.label: line.measured.get(name, {}) for line in self.lines}) for name in self.columns]
        return Sheet(title, [line.label for line in self.lines], lines, self.digits)

    def to_markdown(self) -> str:
        """Published figures stand before the measured ones of their column."""
        printed = {column for line in self.lines for column in line.published}
        notes = any(line.note for line in self.lines)
        header, rows = ["model"], [[line.label] for line in self.lines]
        for column in self.columns:
            header += [f"{column}, published", f"{column}, measured"] if column in printed else [column]
            for cells, line in zip(rows, self.lines, strict=True):
                cells += [_published(line.published.get(column))] if column in printed else []
                found = line.mean_and_spread(column)
                cells.append("–" if found is None else with_spread(*found, self.digits))
        if notes:
            header.append("")
            for cells, line in zip(rows, self.lines, strict=True):
                cells.append(line.note)
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, with every seed's value."""
        rows = [
            {
                "label": line.label,
                "note": line.note,
                "published": {name: _plain(value) for name, value in line.published.items()},
                "measured": {column: _cell(line, column) for column in self.columns if column in line.measured},
            }
            for line in self.lines
        ]
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
        """The whole page."""
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
        """Plain data, ready for JSON."""
        target = self.target
        told = {"target": target.name, "title": target.title, "paper": target.paper, "notes": target.notes}
        sheets = [sheet.to_dict() for sheet in self.sheets]
        found = {"seeds": self.seeds, "pending": list(self.pending), "sheets": sheets}
        return {"format": FORMAT, **told, **found, **self.record}


def _cell(line: Line, column: str) -> dict[str, Any]:
    mean, spread = line.mean_and_spread(column) or (float("nan"), float("nan"))
    by_seed = {str(seed): finite(value) for seed, value in line.measured[column].items()}
    return {"mean": finite(mean), "spread": finite(spread), "by_seed": by_seed}


def _published(value: Published | None) -> str:
    if value is None:
        return "–"
    return f"{value[0]} ± {value[1]}" if isinstance(value, tuple) else str(value)


def _plain(value: Published) -> dict[str, float]:
    return {"mean": value[0], "spread": value[1]} if isinstance(value, tuple) else {"mean": value}
