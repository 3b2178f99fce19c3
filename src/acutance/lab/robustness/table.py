"""RobustnessTable: accuracy by corruption and severity, and under attack."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from acutance.files.atomic import read_json
from acutance.lab.robustness.corruptions import CORRUPTIONS, SEVERITIES
from acutance.report.tables import FittedTable, Result

FORMAT = "acutance-robustness/1"
CLEAN = "clean"
ACCURACY = "accuracy in %, by severity"


def cell_name(corruption: str, severity: int) -> str:
    """How the cell of a corruption is called, such as fog:3."""
    return f"{corruption}:{severity}"


def table_name(split: str = "test", weights: str = "last", corrupted_dir: Path | None = None) -> str:
    """The file in a run's folder: robustness.json for the last weights and drawn corruptions of the test set."""
    others = [split] * (split != "test") + [weights] * (weights != "last")
    others += [] if corrupted_dir is None else [corrupted_dir.resolve().name]
    return "-".join(["robustness", *others]) + ".json"


@dataclass(frozen=True)
class RobustnessTable(Result):
    """Top-1 accuracies in percent, by cell: `clean`, `fog:3`, `fgsm:1`; and what they were measured on."""

    cells: Mapping[str, float]
    context: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, cell: str) -> float:
        if cell not in self.cells:
            raise KeyError(f"no cell {cell!r} in this table; it holds {', '.join(self.cells) or 'nothing'}")
        return self.cells[cell]

    @property
    def corruptions(self) -> list[str]:
        """Those measured at some severity at least, in the benchmark's order."""
        measured = {cell.partition(":")[0] for cell in self.cells}
        return [name for name in CORRUPTIONS if name in measured]

    @property
    def severities(self) -> list[int]:
        """Those measured for some corruption at least."""
        return [s for s in SEVERITIES if any(cell_name(name, s) in self.cells for name in CORRUPTIONS)]

    @property
    def attacks(self) -> dict[str, float]:
        return {cell: value for cell, value in self.cells.items() if cell.partition(":")[0] in ("fgsm", "pgd")}

    def mean(self, *, corruption: str | None = None, severity: int | None = None) -> float | None:
        """The plain mean of a row, a column or all corruptions; None unless every cell in it was measured."""
        names = self.corruptions if corruption is None else [corruption]
        levels = self.severities if severity is None else [severity]
        values = [self.cells.get(cell_name(name, level)) for name in names for level in levels]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None

    def summary(self) -> dict[str, float]:
        """Clean and attacked accuracy, and all means of corruptions that are complete, by name."""
        found: dict[str, float | None] = {CLEAN: self.cells.get(CLEAN), **self.attacks}
        found |= {name: self.mean(corruption=name) for name in self.corruptions}
        found |= {f"severity {level}": self.mean(severity=level) for level in self.severities}
        found["mean of corruptions"] = self.mean()
        return {name: value for name, value in found.items() if value is not None}

    def table(self) -> FittedTable:
        return FittedTable(self.title, self.rows(), self.caption, keys=(ACCURACY,), left=(ACCURACY,))

    def markdown(self) -> str:
        rows = self.rows()
        header = list(rows[0]) if rows else []
        rule = ["---", *["---:"] * (len(header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in [header, rule, *(row.values() for row in rows)]]
        return "\n".join([f"**{self.title}**", "", *lines, "", self.caption, ""])

    def rows(self) -> list[dict[str, str]]:
        """Clean and attacked accuracy, which have no severity; the corruptions; their mean."""
        levels = self.severities
        clean = {CLEAN: self.cells[CLEAN]} if CLEAN in self.cells else {}
        found: dict[str, list[Any]] = {name: [""] * len(levels) + [v] for name, v in {**clean, **self.attacks}.items()}
        for name in self.corruptions:
            found[name] = [*(self.cells.get(cell_name(name, s)) for s in levels), self.mean(corruption=name)]
        if self.corruptions:
            found["mean of corruptions"] = [*(self.mean(severity=level) for level in levels), self.mean()]
        header = (ACCURACY, *map(str, levels), "mean" if levels else "all")
        texts = {
            name: [v if isinstance(v, str) else "–" if v is None else f"{v:.2f}" for v in values]
            for name, values in found.items()
        }
        return [dict(zip(header, (name, *cells), strict=True)) for name, cells in texts.items()]

    @property
    def title(self) -> str:
        return str(self.context.get("name", self.context.get("model", "model")))

    @property
    def caption(self) -> str:
        """What was measured, and on what, in one line."""
        wanted = ("data", "images", "corruptions", "seed", "device", "dtype")
        parts = [f"{key}: {self.context[key]}" for key in wanted if key in self.context]
        return "; ".join(["top-1 accuracy; attacks are L∞, ε in levels of 255", *parts])

    def to_json(self) -> str:
        body = {"format": FORMAT, "context": dict(self.context), "cells": dict(self.cells)}
        return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RobustnessTable:
        return read_json(
            path, FORMAT, lambda body: cls({str(k): float(v) for k, v in body["cells"].items()}, dict(body["context"]))
        )
