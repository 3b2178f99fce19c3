"""The pictures of what `acutance bench` found, drawn from small tables made up here."""

import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from acutance.lab.bench.results import write_rows

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
RESULTS = SCRIPTS / "results"
PICTURES = SCRIPTS.parent / "docs" / "assets" / "bench"


def drawn(script: str, rows: Sequence[Mapping[str, object]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = write_rows(folder / "table.csv", [dict(row) for row in rows], {"device": "A toy GPU"})
    return drawn_from(script, source, folder, monkeypatch)


def drawn_from(script: str, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    target = folder / "pictures" / "drawn.svg"
    monkeypatch.setattr(sys, "argv", [script, str(source), str(target)])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return target.read_text()


def row(variant: str, ms: float, **others: object) -> dict[str, object]:
    ends = {f"{name}_{end}": ms for name in ("ms", "ratio") for end in ("min", "max")}
    return {"table": "a table", "variant": variant, "ms": ms, "ratio": ms, **ends, **others}


def test_cost_against_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With memory where it is known, without what was not tried."""
    rows = [
        row("A v", 1.0, tokens=2048, peak_mib=2.0),
        row("entropy", 2.0, tokens=2048, peak_mib=""),
        row("A v", 4.0, tokens=4096, peak_mib=4.0),
        row("entropy", 9.0, tokens=4096, peak_mib=0.0),
        {"table": "a table", "variant": "whole matrices", "tokens": 4096, "note": "not tried"},
    ]
    text = drawn("plot_tokens.py", rows, tmp_path, monkeypatch)
    for words in ("A v", "entropy", "4,096", "a table, A toy GPU"):
        assert f"<!-- {words}" in text, words
    assert "whole matrices" not in text
    assert text == drawn("plot_tokens.py", rows, tmp_path, monkeypatch)


def test_cost_against_tokens_without_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "<!-- A v" in drawn("plot_tokens.py", [row("A v", 1.0, tokens=16)], tmp_path, monkeypatch)


def test_steps_in_their_fastest_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        row("timm's ViT", 1.0, mode="reduce-overhead"),
        row("NeuTRENO", 0.9, mode="reduce-overhead"),
        row("NeuTRENO", 1.7, mode="default"),
        row("floor of the plain model", 0.3, mode=""),
    ]
    both = [{**found, "table": table} for table in ("training", "inference") for found in rows]
    text = drawn("plot_steps.py", both, tmp_path, monkeypatch)
    for words in ("training", "inference", "0.900", "1.000"):
        assert f"<!-- {words} -->" in text, words
    assert "1.700" not in text


def texts(svg: str) -> list[str]:
    """What is written in a picture, whichever version of matplotlib drew it."""
    return re.findall(r"<!-- (.*?) -->", svg, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("script", "source", "picture"),
    [
        ("plot_steps.py", "bench-steps-32-*.csv", "steps-32"),
        ("plot_steps.py", "bench-steps-224-*.csv", "steps-224"),
        ("plot_tokens.py", "bench-long-tokens-*.csv", "long-tokens"),
        ("plot_tokens.py", "bench-long-model-*.csv", "long-model"),
        ("plot_overview.py", "", "overview"),
    ],
)
def test_the_pictures_of_the_page_are_those_of_its_files(
    script: str, source: str, picture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = next(RESULTS.glob(source)) if source else RESULTS
    found = texts(drawn_from(script, place, tmp_path, monkeypatch))
    assert found == texts((PICTURES / f"{picture}.svg").read_text())
    assert f"assets/bench/{picture}.svg" in (PICTURES.parents[1] / "bench.md").read_text()


def test_the_overview_divides_by_flash_in_pairs(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPTS / "plot_overview.py"))
    rows = [row("plain, SDPA flash", 2.0), row("NeuTRENO, fused kernel", 1.0)]
    rows[1] |= {f"beside_ratio{end}": value for end, value in (("", 0.6), ("_q1", 0.5), ("_q3", 0.7))}
    table = {"table": "causal LM, 2048 tokens, training"}
    write_rows(tmp_path / "bench-long-training-gpu.csv", [{**found, **table} for found in rows], {})
    write_rows(tmp_path / "bench-long-training-gpu-another-machine.csv", [], {"table": ""})
    assert script["found"](tmp_path, script["language"](2048)) == (0.6, 0.5, 0.7)
