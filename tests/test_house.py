"""The rules of the house: who may import whom, what an import costs, and that planted faults still fit the source."""

import ast
import operator
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import acutance as ac
from acutance import moved
from faults.run import read_faults

ROOT = Path(ac.__file__).parent
FAULTS = read_faults()  # whether they are caught, `make faults` says
PURE = {"attention", "metrics", "mitigations"}
ABOVE = {"sites", "models", "measure", "explain", "diagnose", "report", "io", "cli", "lab"}


def room_imports() -> dict[str, set[str]]:
    """The rooms that each room imports, inside functions and for typing too."""
    found: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} has a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            rooms = {name.split(".")[1] for name in names if name.startswith("acutance.")}
            found.setdefault(room, set()).update(rooms - {room})
    return {room: others for room, others in found.items() if room not in ("__init__", "__main__")}


def test_rooms_import_only_what_is_below_them():
    found = room_imports()
    list(TopologicalSorter(found).static_order())  # raises at a cycle
    assert not {room for room, others in found.items() if "lab" in others}  # `__main__` puts the command line together
    assert not {room: others & ABOVE for room, others in found.items() if room in PURE and others & ABOVE}
    assert not found["report"] & (ABOVE | PURE)


def imported(program: str, *arguments: str) -> set[str]:
    """The modules that a program imports."""
    program += "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_and_import_do_not_import_torch():
    command = "try:\n    from acutance.__main__ import run; run()\nexcept SystemExit: pass"
    for found in (imported("import acutance"), imported(command, "--help"), imported(command, "mesure")):
        assert "acutance" in found
        assert not found & {"torch", "numpy", "acutance.lab.train", "acutance.lab.recipes"}


def test_verbs_stay_functions_when_their_rooms_are_imported():
    rooms = "acutance.measure.walk, acutance.explain.spectrum, acutance.diagnose.quality"
    same = "[f.__name__ for f in (ac.measure, ac.explain, ac.diagnose)] == ['measure', 'explain', 'diagnose']"
    imported(f"import {rooms}\nimport acutance as ac\nassert {same}")


def test_public_names_and_the_places_of_old_ones_are_there():
    assert all(hasattr(ac, name) for name in ac.__all__)
    for name in moved.MOVED.values():
        place = ROOT / name.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file() or operator.attrgetter(name)(ac), name


@pytest.mark.parametrize(
    ("statement", "new"),
    [
        ("ac.walk", "acutance.measure.walk"),
        ("import acutance.saving", "acutance.io"),
        ("from acutance import train", "acutance.lab.train"),
        ("from acutance.operator import AttentionOperator", "acutance.attention.operator"),
        ("from acutance.models import save_checkpoint", "acutance.save"),
    ],
)
def test_old_names_say_the_new_ones(statement, new):
    with pytest.raises((AttributeError, ImportError), match=f"it is {new} now"):
        exec(statement, {"ac": ac})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.room}/{fault.name}")
def test_a_fault_can_be_planted_and_its_tests_are_there(fault):
    fault.planted((ROOT / fault.file).read_text("utf-8"))
    assert fault.does.endswith(".")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (Path(__file__).parents[1] / file).read_text("utf-8")
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.MULTILINE), test


def test_names_are_told_apart_and_every_room_has_three():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert min(Counter(fault.room for fault in FAULTS).values()) >= 3
