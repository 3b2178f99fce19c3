"""Tables for terminals of any width, and for notebooks."""

import re

import pytest
from rich.console import Console

from acutance.measure.profile import MetricValue, Profile
from acutance.measure.reader import available_metrics
from acutance.report.tables import FittedTable


def printed(what: object, width: int) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def profile(mean: float) -> Profile:
    names = available_metrics()
    readings = [MetricValue("block", layer, name, mean + layer, 0.5, 3) for name in names for layer in (1, 2)]
    return Profile(tuple(readings), {"model": "ViT", "samples": 3})


@pytest.mark.parametrize("width", [60, 80, 110, 400])
def test_nothing_is_cut_off_or_broken_however_narrow(width: int) -> None:
    before, after = profile(0.0), profile(1.0)
    for what, cell in ((before.table(), "2.0000 ± 0.5000"), (before.compare(after), "2.0000 → 3.0000")):
        text = printed(what, width)
        assert "…" not in text
        assert [name for name in available_metrics() if not re.search(rf"\b{name}\b", text)] == []
        assert text.count(cell) == len(available_metrics())
        assert max(map(len, text.splitlines())) <= width
        if width == 400:  # one table, one caption
            assert (text.count("layer"), text.count("3 samples, mean")) == (1, 1)


def test_a_table_has_the_rows_of_its_columns_only() -> None:
    places = (("block", 1, "token_cosine"), ("final", 1, "norm_spread"))
    readings = tuple(MetricValue(*place, 0.1, 0, 1) for place in places)
    first, second = printed(Profile(readings, {}).table(), 40).split("norm_spread")
    assert ("block" in first, "final" in first) == (True, False)
    assert ("block" in second, "final" in second) == (False, True)


def test_sentences_wrap_and_stay_in_their_table() -> None:
    rows = [{"layer": "1", "short": "x", "why": "word " * 30}]
    text = printed(FittedTable("", rows, "", sentences="why"), 60)
    assert re.search("short.*why", text)
    assert text.count("word") == 30


def test_notebooks_show_an_escaped_table() -> None:
    html = FittedTable("a < b", [{"layer": "1", "x": "<b>"}], "end")._repr_html_()
    assert "a &lt; b" in html
    assert "<th>x</th>" in html
    assert "<td>&lt;b&gt;</td>" in html
