"""All cells of one library, those of two processes together; what is documented of them; and the tests of both."""

import json
import os
import tempfile
from dataclasses import asdict, astuple
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity_cells import (
    BUCKET,
    DEPTH,
    EXACTLY,
    PRECISIONS,
    PROCESSES,
    RUNS,
    TOLERANCE,
    Cell,
    Outcome,
    assert_as_pinned,
    cells,
    distance,
    plain_gradients,
    run_cell,
    wanted_gradients,
)
from parity_subjects import SUBJECTS, subject_of

from together import in_two_processes

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "parity.md"
HEADS = ("multi-head", "grouped-query")
COLUMNS = (("one process", EXACTLY), *product(PROCESSES, PRECISIONS))
MARGIN = {EXACTLY: 1e6, "float32": 1e4, "bfloat16": 5}  # by how much the smallest mistake is to exceed the tolerance
WRITE = "WRITE_MATRIX"  # set in the environment, it makes the run write what it would otherwise check


class Matrix:
    """The outcomes of one library, each found when it is first asked for."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.found: dict[Cell, Outcome] = {}

    def outcome(self, cell: Cell) -> Outcome:
        """Starting processes is slow, so all cells that need two share them."""
        if cell not in self.found and cell.processes == "one process":
            self.found[cell] = run_cell(self.library, cell)
        elif cell not in self.found:
            self.found |= _in_two_processes(self.library)
        return self.found[cell]

    def record(self) -> dict:
        """For the documentation."""
        found = [asdict(cell) | _written(self.outcome(cell)) for cell in cells(self.library)]
        return {
            "library": self.library,
            "versions": _versions(self.library),
            "smallest cut": {precision: _rounded(smallest_cut(self.library, precision)) for precision in MARGIN},
            "plain rounding": {
                precision: _rounded(plain_rounding(self.library, precision)) for precision in PRECISIONS
            },
            "cells": found,
        }


def tested(library: str) -> list[Cell]:
    """All cells of one process, and of those of two, which are slow, so many that every pair of settings occurs."""
    alone = [cell for cell in cells(library) if cell.processes == "one process"]
    if WRITE in os.environ:
        return cells(library)
    rest = {cell: set(combinations(enumerate(astuple(cell)), 2)) for cell in cells(library) if cell not in alone}
    chosen, wanted = [], set().union(*rest.values())
    while wanted:
        best = max(rest, key=lambda cell: len(rest[cell] & wanted))
        chosen.append(best)
        wanted -= rest[best]
    return alone + chosen


def _in_two_processes(library: str) -> dict[Cell, Outcome]:
    chosen = [cell for cell in tested(library) if cell.processes != "one process"]
    with tempfile.TemporaryDirectory() as folder:
        in_two_processes(_worker, library, chosen, folder)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    outcomes = {}
    for cell, *both in zip(chosen, *found, strict=True):
        first, second = (Outcome(**outcome) for outcome in both)
        assert first.result == second.result, f"{cell}: {first} in one process, {second} in the other"
        outcomes[cell] = max(first, second, key=lambda outcome: outcome.error or 0.0)
    return outcomes


def _worker(rank: int, library: str, chosen: list[Cell], folder: str) -> None:
    dist._DEFAULT_FIRST_BUCKET_BYTES = BUCKET
    outcomes = [asdict(run_cell(library, cell)) for cell in chosen]
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))


def smallest_cut(library: str, precision: str) -> float:
    """The error of the smallest mistake: a gradient through v⁰ that is missing in one layer only."""
    errors = []
    for run, heads in product(RUNS, SUBJECTS[library].heads):
        subject = subject_of(library, DEPTH[run])
        for layer in range(2, subject.depth + 1):
            cut = plain_gradients(subject, heads, precision, cut=layer)
            errors.append(distance(cut, wanted_gradients(subject, heads, precision)))
    return min(errors)


def plain_rounding(library: str, precision: str) -> float:
    """How far the plain formula itself is from float64: what rounding makes of gradients that are right."""
    errors = []
    for run, heads in product(RUNS, SUBJECTS[library].heads):
        subject = subject_of(library, DEPTH[run])
        rounded = plain_gradients(subject, heads, precision)
        errors.append(distance(rounded, plain_gradients(subject, heads, EXACTLY)))
    return max(errors)


class MatrixChecks:
    """Inherited by one test class per library."""

    library: str

    def pytest_generate_tests(self, metafunc):
        if "cell" in metafunc.fixturenames:
            quick = ("eager", "one process")
            marks = {
                cell: () if (cell.run, cell.processes) == quick else pytest.mark.slow for cell in tested(self.library)
            }
            metafunc.parametrize("cell", [pytest.param(cell, marks=marks[cell], id=str(cell)) for cell in marks])

    @pytest.fixture(scope="class")
    @classmethod
    def matrix(cls):
        return Matrix(cls.library)

    def test_gradients_equal_the_plain_formula_or_are_refused_as_pinned(self, matrix, cell):
        assert_as_pinned(self.library, cell, matrix.outcome(cell))

    @pytest.mark.parametrize("precision", MARGIN)
    def test_a_gradient_cut_at_one_layer_would_be_seen(self, precision):
        assert smallest_cut(self.library, precision) > MARGIN[precision] * TOLERANCE[precision]

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_the_tolerance_is_no_wider_than_rounding_asks_for(self, precision):
        assert TOLERANCE[precision] / 256 < plain_rounding(self.library, precision) < TOLERANCE[precision]

    @pytest.mark.slow
    def test_the_documentation_shows_what_was_found(self, matrix):
        recorded = DOCS / "evidence" / "parity" / f"{self.library}.json"
        if WRITE in os.environ:
            recorded.parent.mkdir(exist_ok=True)
            recorded.write_text(json.dumps(matrix.record(), indent=1) + "\n")
            PAGE.write_text(_with_table(PAGE.read_text(), json.loads(recorded.read_text())))
        record = json.loads(recorded.read_text())
        assert PAGE.read_text() == _with_table(PAGE.read_text(), record), f"{PAGE} does not show {recorded}"
        if _minor(record["versions"]["torch"]) != _minor(torch.__version__):
            pytest.skip(f"recorded with torch {record['versions']['torch']}")
        documented = {Cell(*list(cell.values())[:5]): cell["result"] for cell in record["cells"]}
        found = {cell: matrix.outcome(cell).result for cell in tested(self.library)}
        differing = [
            f"{cell}: {found[cell]}, not {documented.get(cell)}"
            for cell in found
            if found[cell] != documented.get(cell)
        ]
        assert not differing, f"run with {WRITE}=1 if this is meant: {differing}"


def _with_table(page: str, record: dict) -> str:
    """The page with the library's table between its markers."""
    start, end = f"<!-- parity: {record['library']} -->\n", "\n<!-- end -->"
    assert page.count(start) == 1, f"{PAGE} must have one {start.strip()}, and {end.strip()} after it"
    before, after = page.split(start)
    return before + start + _table(record) + end + after.partition(end)[2]


def _table(record: dict) -> str:
    """A row for every way to run the model, a column for every way to distribute and round it."""
    rows: dict[tuple, dict] = {}
    for cell in record["cells"]:
        row = (cell["run"], cell["checkpointing"], cell["heads"])
        rows.setdefault(row, {})[cell["processes"], cell["precision"]] = cell["result"]
    heading = ["run", "checkpointing", "heads", *(f"{processes}, {precision}" for processes, precision in COLUMNS)]
    lines = [heading, ["---"] * len(heading)]
    lines += [[*row, *(results.get(column, "–") for column in COLUMNS)] for row, results in rows.items()]
    for heads in HEADS:
        if not any(row[2] == heads for row in rows):
            lines.append(["any", "any", heads, *["does not exist in the library"] * len(COLUMNS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _written(outcome: Outcome) -> dict:
    error = None if outcome.error is None else _rounded(outcome.error)
    return {"result": outcome.result, "error": error, "message": outcome.message}


def _rounded(error: float) -> float:
    return float(f"{error:.1e}")


def _versions(library: str) -> dict[str, str]:
    versions = {"torch": torch.__version__.partition("+")[0]}
    try:
        return versions | {library: version(library)}
    except PackageNotFoundError:  # ours, and a part of torch
        return versions


def _minor(release: str) -> list[str]:
    return release.split(".")[:2]
