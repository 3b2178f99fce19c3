"""The page that says which function and which test stands for a statement names only what is there."""

import re
from pathlib import Path

import pytest

import acutance
from acutance import metrics
from acutance.attention.operator import AttentionOperator
from acutance.explain import Spectrum, spectral_theory, steer
from acutance.lab import studies as laboratory

ROOT = Path(__file__).parents[3]
TABLE = (ROOT / "docs" / "laboratory.md").read_text(encoding="utf-8").split("## Each statement")[1]
ROWS = [line.split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][1:]
PLACES = (spectral_theory, laboratory, metrics, steer, acutance, AttentionOperator, Spectrum)


@pytest.fixture(scope="module")
def known_tests():
    return {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }


@pytest.mark.parametrize(
    "row", [row for row in ROWS if not set(row[0]) <= set("|- ")], ids=lambda row: row[0].strip("| ")
)
def test_a_statement_has_a_function_and_a_test(row, known_tests):
    _, functions, tests = row
    for name in re.findall(r"`([\w.]+)`", functions):
        assert any(hasattr(place, name.split(".")[-1]) for place in PLACES), name
    named = re.findall(r"`(test_\w+|tests/[\w./]+|test_\w+\.py)`", tests)
    assert named
    for name in named:
        assert name in known_tests or (ROOT / name).exists() or list((ROOT / "tests").rglob(name)), name
