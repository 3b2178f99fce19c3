"""The page that says which function and which test stands for a statement names only what is there."""

import re
from pathlib import Path

import acutance
from acutance import metrics
from acutance.attention.operator import AttentionOperator
from acutance.explain import Spectrum, spectral_theory, steer
from acutance.lab import studies

ROOT = Path(__file__).parents[3]
PLACES = (spectral_theory, studies, metrics, steer, acutance, AttentionOperator, Spectrum)


def test_a_statement_has_a_function_and_a_test():
    table = (ROOT / "docs" / "laboratory.md").read_text(encoding="utf-8").split("## Each statement")[1]
    files = (ROOT / "tests").rglob("test_*.py")
    known = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for statement, functions, tests in rows:
        for name in re.findall(r"`([\w.]+)`", functions):
            assert any(hasattr(place, name.split(".")[-1]) for place in PLACES), name
        named = re.findall(r"`(test_\w+|tests/[\w./]+)`", tests)
        assert named, statement
        assert all(name in known or (ROOT / name).exists() for name in named), named
