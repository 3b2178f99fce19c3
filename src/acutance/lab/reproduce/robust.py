"""Accuracy of runs on corrupted and attacked test images, read from `acutance.lab.robustness`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from acutance.lab.reproduce.report import Line, Sheet
from acutance.lab.reproduce.target import Row
from acutance.lab.robustness import FGSM, PGD, SEVERITIES, RobustnessTable, evaluate, table_name
from acutance.lab.robustness.images import images_of

if TYPE_CHECKING:
    from acutance.lab.reproduce.session import Session

PUBLISHED = "CIFAR-100-C"  # in the data folder: the published files, read where they are
EPSILON = 1.0  # of 255
ATTACKS: Mapping[str, FGSM | PGD] = {"fgsm": FGSM(EPSILON), "pgd": PGD(EPSILON)}
TINY_CORRUPTIONS = ("gaussian_noise", "contrast")
Tables = Mapping[int, RobustnessTable]  # by seed


def robustness(session: Session) -> list[Sheet]:
    """What the target's columns ask for; of corruptions also each by itself, the mean over severities."""
    columns, rows = session.target.columns, session.target.rows
    found = {row.label: {seed: _table(session, row, seed) for seed in session.ready(row)} for row in rows}
    lines = [
        Line(
            row.label,
            {
                column: {seed: _value(table, text) for seed, table in found[row.label].items()}
                for column, text in columns.items()
            },
            row.published,
            session.why_missing(row),
        )
        for row in rows
    ]
    table = Sheet(session.target.title, list(columns), lines)
    return [table, _by_corruption(found)] if _corrupted(session) else [table]


def _by_corruption(found: Mapping[str, Tables]) -> Sheet:
    """A line for each corruption, a column for each model."""
    names = dict.fromkeys(name for tables in found.values() for table in tables.values() for name in table.corruptions)
    lines = [
        Line(
            name,
            {label: {seed: _mean(table, name) for seed, table in tables.items()} for label, tables in found.items()},
        )
        for name in names
    ]
    return Sheet("By corruption, mean over severities", list(found), lines)


def _corrupted(session: Session) -> bool:
    return any(text.startswith("severity/") for text in session.target.columns.values())


def _table(session: Session, row: Row, seed: int) -> RobustnessTable:
    """All cells that the target needs, in the file that `acutance robustness` writes: nothing is measured twice."""
    planned, tiny = session.planned(row, seed), session.scale == "tiny"
    asked = session.target.columns.values()
    corruptions = {"corruptions": TINY_CORRUPTIONS} if tiny else {}
    folder = None if session.data_dir is None or tiny else session.data_dir / PUBLISHED
    read = folder if folder is not None and folder.is_dir() and planned.config.task.kind == "classification" else None
    return evaluate(
        session.model(row, seed),
        images_of(planned.config.task, "test", limit=session.samples if tiny else None),
        **(corruptions if _corrupted(session) else {"corruptions": ()}),
        severities=SEVERITIES,
        attacks=[ATTACKS[text.removeprefix("attack/")] for text in asked if text.startswith("attack/")],
        path=planned.run.folder / table_name(corrupted_dir=read),
        corrupted_dir=read,
        context={"name": planned.label, "split": "test", "which": "last"},
    )


def _value(table: RobustnessTable, text: str) -> float:
    """By what a column says: `clean`, `severity/3` (mean over the corruptions) or `attack/pgd`."""
    kind, _, name = text.partition("/")
    if kind == "severity":
        mean = table.mean(severity=int(name))
        assert mean is not None, "every cell was measured"
        return mean
    return table[ATTACKS[name].name if kind == "attack" else kind]


def _mean(table: RobustnessTable, corruption: str) -> float:
    mean = table.mean(corruption=corruption)
    assert mean is not None, "every cell was measured"
    return mean
