"""All cells of one library, those of two processes together; the evidence of them; and the tests of both."""

import csv
import json
import os
import tempfile
from dataclasses import asdict, astuple, fields
from functools import cache
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
from parity_subjects import MITIGATIONS, SUBJECTS, subject_of

MARGIN = {EXACTLY: 1e6, "float32": 1e4, "bfloat16": 5}  # by how much the smallest mistake is to exceed the tolerance
ALL = "ALL_CELLS"  # set in the environment, it runs all cells, and writes the evidence
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

    def write(self) -> None:
        """The evidence: every cell of the library, and how small a mistake these models would show."""
        with _evidence(self.library).open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow([*(field.name for field in fields(Cell)), "result", "error"])
            for cell in cells(self.library):
                got = self.outcome(cell)
                rows.writerow([*astuple(cell), got.result, "" if got.error is None else f"{got.error:.1e}"])
        file = EVIDENCE / "libraries.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known[self.library] = {
            "torch": torch.__version__.partition("+")[0],
            "smallest cut": {precision: float(f"{smallest_cut(self.library, precision):.1e}") for precision in MARGIN},
            "plain rounding": {each: float(f"{plain_rounding(self.library, each):.1e}") for each in PRECISIONS},
        }
        file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def _evidence(library: str) -> Path:
    return EVIDENCE / f"{library}.csv"


def read_evidence(library: str) -> dict[Cell, tuple[str, float]]:
    """The result and the error of every cell."""
    with _evidence(library).open(newline="") as file:
        return {Cell(*row[:6]): (row[6], float(row[7] or 0)) for row in list(csv.reader(file))[1:]}


def table() -> str:
    """The evidence of all libraries: a row for each kind of heads and mitigation, a column for each way to run."""
    columns = list(product(RUNS, PROCESSES))
    lines = [["library", "heads", "mitigation", *(f"{run}, {processes}" for run, processes in columns)]]
    for library, subject in SUBJECTS.items():
        found = read_evidence(library)
        for row in product(subject.heads, MITIGATIONS):
            mine = {cell: result for cell, (result, _) in found.items() if (cell.heads, cell.mitigation) == row}
            lines.append([library, *row, *(_in_words(mine, *column) for column in columns)])
    return _as_table(lines)


def _in_words(results: dict[Cell, str], run: str, processes: str) -> str:
    """One word, or what re-entrant checkpointing gives beside it."""
    found = [
        (c.checkpointing == "re-entrant", r) for c, r in results.items() if (c.run, c.processes) == (run, processes)
    ]
    usual, other = ("/".join(sorted({r for is_other, r in found if is_other == which})) for which in (False, True))
    return usual if usual == other else f"{usual}, re-entrant {other}"


def table_of_errors() -> str:
    """What each precision allows, and what was found in all libraries together."""
    lines = [
        ["precision", "tolerance", "largest error of a cell", "rounding of the formula itself", "smallest mistake"]
    ]
    libraries = json.loads((EVIDENCE / "libraries.json").read_text()).values()
    for precision, tolerance in TOLERANCE.items():
        errors = [e for name in SUBJECTS for c, (_, e) in read_evidence(name).items() if c.precision == precision]
        rounding = [library["plain rounding"].get(precision, 0) for library in libraries]
        cuts = [library["smallest cut"][precision] for library in libraries]
        figures = [tolerance, max(errors), max(rounding), min(cuts)]
        lines.append([precision, *(f"{figure:.2g}" if figure else "" for figure in figures)])
    return _as_table(lines)


def _as_table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def tested(library: str) -> list[Cell]:
    """All eager cells of one process. Of the others, which are slow, so many that every pair of settings occurs."""
    if ALL in os.environ:
        return cells(library)
    return [cell for cell in cells(library) if is_quick(cell) or (library, cell) in every_pair()]


@cache
def every_pair() -> list[tuple[str, Cell]]:
    """Slow cells of all libraries together in which every two settings meet, the library being one."""
    slow = [(library, cell) for library in SUBJECTS for cell in cells(library) if not is_quick(cell)]
    pairs = {each: set(combinations(enumerate((each[0], *astuple(each[1]))), 2)) for each in slow}
    chosen, wanted = [], set().union(*pairs.values())
    while wanted:
        best = max(pairs, key=lambda each: len(pairs[each] & wanted))
        chosen.append(best)
        wanted -= pairs[best]
    return chosen


def is_quick(cell: Cell) -> bool:
    return (cell.run, cell.processes) == ("eager", "one process")


def _in_two_processes(library: str) -> dict[Cell, Outcome]:
    from together import in_two_processes  # the script that writes the page has no tests/ to import from

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
            marks = {cell: () if is_quick(cell) else pytest.mark.slow for cell in tested(self.library)}
            metafunc.parametrize("cell", [pytest.param(cell, marks=marks[cell], id=str(cell)) for cell in marks])

    @pytest.fixture(scope="class")
    @classmethod
    def matrix(cls):
        return Matrix(cls.library)

    def test_gradients_equal_the_plain_formula_or_are_refused_as_pinned(self, matrix, cell):
        assert_as_pinned(self.library, cell, matrix.outcome(cell))

    @pytest.mark.slow
    def test_the_evidence_is_what_was_found(self, matrix):
        if ALL in os.environ:
            matrix.write()
        kept = {cell: result for cell, (result, _) in read_evidence(self.library).items()}
        assert {cell: matrix.outcome(cell).result for cell in tested(self.library)}.items() <= kept.items()

    @pytest.mark.parametrize("precision", MARGIN)
    def test_a_gradient_cut_at_one_layer_would_be_seen(self, precision):
        assert smallest_cut(self.library, precision) > MARGIN[precision] * TOLERANCE[precision]

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_the_tolerance_is_no_wider_than_rounding_asks_for(self, precision):
        assert TOLERANCE[precision] / 256 < plain_rounding(self.library, precision) < TOLERANCE[precision]
