"""All cells of one library, those of two processes together; the evidence of them; and the tests of both."""

import json
import os
import tempfile
from dataclasses import asdict, astuple
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity_cells import (
    BUCKET,
    CHECKPOINTING,
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

MARGIN = {EXACTLY: 1e6, "float32": 1e4, "bfloat16": 5}  # by how much the smallest mistake is to exceed the tolerance
ALL = "ALL_CELLS"  # set in the environment, it runs all cells of two processes too, and writes the evidence
DOCS = Path(__file__).parents[2] / "docs"
EVIDENCE = DOCS / "evidence" / "parity"


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
        """What docs/evidence/parity keeps."""
        cuts = {precision: _rounded(smallest_cut(self.library, precision)) for precision in MARGIN}
        rounding = {precision: _rounded(plain_rounding(self.library, precision)) for precision in PRECISIONS}
        found = [(cell, self.outcome(cell)) for cell in cells(self.library)]
        return {
            "library": self.library,
            "versions": {"torch": torch.__version__.partition("+")[0]},
            "smallest cut": cuts,
            "plain rounding": rounding,
            "cells": [asdict(cell) | asdict(got) | {"error": _rounded(got.error)} for cell, got in found],
        }


def _rounded(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.1e}")


def table() -> str:
    """The evidence of all libraries: a row for each kind of heads and checkpointing, a column for each way to run."""
    columns = list(product(RUNS, PROCESSES))
    lines = [["library", "heads", "checkpointing", *(f"{run}, {processes}" for run, processes in columns)]]
    lines.append(["---"] * len(lines[0]))
    for library, subject in SUBJECTS.items():
        found = json.loads((EVIDENCE / f"{library}.json").read_text())["cells"]
        for row in product(subject.heads, CHECKPOINTING):
            mine = [cell for cell in found if (cell["heads"], cell["checkpointing"]) == row]
            results = [{c["result"] for c in mine if (c["run"], c["processes"]) == column} for column in columns]
            lines.append([library, *row, *("/".join(sorted(result)) for result in results)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tested(library: str) -> list[Cell]:
    """All cells of one process, and of those of two, which are slow, so many that every pair of settings occurs."""
    alone = [cell for cell in cells(library) if cell.processes == "one process"]
    if ALL in os.environ:
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

    @pytest.mark.slow
    def test_the_evidence_is_what_was_found(self, matrix):
        file = EVIDENCE / f"{self.library}.json"
        if ALL in os.environ:
            file.write_text(json.dumps(matrix.record(), indent=1) + "\n")
        kept = {Cell(*list(cell.values())[:5]): cell["result"] for cell in json.loads(file.read_text())["cells"]}
        assert {cell: matrix.outcome(cell).result for cell in tested(self.library)}.items() <= kept.items()

    @pytest.mark.parametrize("precision", MARGIN)
    def test_a_gradient_cut_at_one_layer_would_be_seen(self, precision):
        assert smallest_cut(self.library, precision) > MARGIN[precision] * TOLERANCE[precision]

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_the_tolerance_is_no_wider_than_rounding_asks_for(self, precision):
        assert TOLERANCE[precision] / 256 < plain_rounding(self.library, precision) < TOLERANCE[precision]
