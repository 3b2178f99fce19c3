"""What was measured beside what was published, as Markdown and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from acutance.lab.evaluate.compare import finite, with_spread
from acutance.lab.reproduce.target import Published, Target

FORMAT = "acutance-reproduction/1"
TINY = (
    "**Tiny scale: stand-ins in place of the data, and models of a few thousand parameters. These numbers show that "
    "every step works; they say nothing about the paper.**"
)


@dataclass(frozen=True)
class Line:
    """One model: what was published of it, and what was measured, by column and seed."""

    label: str
    measured: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""  # why something is missing

    def mean_and_spread(self, column: str) -> tuple[float, float] | None:
        """Over seeds; the spread of one is NaN."""
        values = list(self.measured.get(column, {}).values())
        if not values:
            return None
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class Sheet:
    """A table; a figure is one with a column for each layer."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    digits: int = 2

    def to_markdown(self) -> str:
        """Published figures stand before the measured ones of their column."""
        printed = [column for column in self.columns if any(column in line.published for line in self.lines)]
        notes = any(line.note for line in self.lines)
        header = ["model"]
        for column in self.columns:
            header += [f"{column}, published", f"{column}, measured"] if column in printed else [column]
        rows = []
        for line in self.lines:
            cells = [line.label]
            for column in self.columns:
                cells += ([_published(line.published.get(column))] if column in printed else []) + [
                    self._measured(line, column)
                ]
            rows.append([*cells, *([line.note] if notes else [])])
        header += [""] if notes else []
        text = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in text) + "\n"

    def _measured(self, line: Line, column: str) -> str:
        found = line.mean_and_spread(column)
        return "–" if found is None else with_spread(*found, self.digits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; every seed's value is there."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [
                {
                    "label": line.label,
                    "note": line.note,
                    "published": {name: _plain(value) for name, value in line.published.items()},
                    "measured": {column: self._cell(line, column) for column in line.measured},
                }
                for line in self.lines
            ],
        }

    def _cell(self, line: Line, column: str) -> dict[str, Any]:
        found = line.mean_and_spread(column)
        mean, spread = (None, None) if found is None else (finite(found[0]), finite(found[1]))
        return {
            "mean": mean,
            "spread": spread,
            "by_seed": {str(seed): finite(value) for seed, value in line.measured[column].items()},
        }


@dataclass(frozen=True)
class Result:
    """A target's sheets, and what else belongs to them."""

    target: Target
    scale: str
    seeds: int
    sheets: tuple[Sheet, ...]
    pending: tuple[str, ...]  # runs that are not finished
    record: Mapping[str, Any]  # versions, hardware, command

    def to_markdown(self) -> str:
        """The whole of it."""
        parts = [f"## {self.target.title}\n", *([TINY + "\n"] if self.scale == "tiny" else [])]
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
        return {
            "format": FORMAT,
            "target": self.target.name,
            "title": self.target.title,
            "paper": self.target.paper,
            "notes": self.target.notes,
            "scale": self.scale,
            "seeds": self.seeds,
            "pending": list(self.pending),
            "sheets": [sheet.to_dict() for sheet in self.sheets],
            **self.record,
        }


def _published(value: Published | None) -> str:
    if value is None:
        return "–"
    return f"{value[0]} ± {value[1]}" if isinstance(value, tuple) else str(value)


def _plain(value: Published) -> dict[str, float]:
    return {"mean": value[0], "spread": value[1]} if isinstance(value, tuple) else {"mean": value}
