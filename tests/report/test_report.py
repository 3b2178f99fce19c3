"""The HTML page in a real browser; pictures; and tables for terminals of any width, and for notebooks."""

import math
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

from acutance.measure import DEFAULT_METRICS
from acutance.measure.profile import MetricValue, Profile
from acutance.measure.reader import available_metrics
from acutance.report.page import write_page
from acutance.report.pictures import plot_attention, plot_curves
from acutance.report.tables import FittedTable, short
from report.made_profiles import made_profile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
HOSTILE = "neutreno </script><script>document.title='owned'</script>"
TAPS = ("block", "attention")
RUNS = {name: made_profile(slope, taps=TAPS, depth=3) for name, slope in (("plain", 0.1), (HOSTILE, 0.2))}


@pytest.fixture
def page(tmp_path):
    summary = [{"variant": "plain", "accuracy %": "97.5"}]
    return write_page(RUNS, tmp_path / "p.html", verdict="All <good>.", summary=summary)


def test_page_asks_for_nothing_outside_itself(page) -> None:
    text = page.read_text()
    for outside in ('src="http', 'href="http', "@import", "<link"):
        assert outside not in text.split("<script")[0]
    assert "All &lt;good&gt;." in text
    assert HOSTILE not in text


def test_infinite_readings_do_not_break_the_page(tmp_path) -> None:
    profile = Profile((MetricValue("block", 1, "hfc_lfc_spectral", math.inf, math.nan, 1), *RUNS["plain"].readings))
    text = profile.to_html(tmp_path / "p.html").read_text()
    assert "Infinity" not in text.split("const charts = ")[1]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_page_in_a_real_browser(page) -> None:
    from playwright.sync_api import sync_playwright

    errors, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = browser.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready=true]", timeout=30_000)
        assert tab.title() == "Over-smoothing, layer by layer"
        assert tab.locator("#chart-block svg.marks").count() == 1
        titles = tab.locator("#chart-attention .role-title-text").all_text_contents()
        assert titles == ["token_cosine", "rank_residual"]
        # Two curves in each of two charts; picking one in the legend fades the other in both.
        curves = tab.locator("#chart-block .mark-line path")
        assert curves.count() == 4
        tab.locator("#chart-block").get_by_text("plain", exact=True).click()
        tab.wait_for_function(
            "() => document.querySelectorAll('#chart-block .mark-line path[opacity=\"0.1\"]').length === 2"
        )
        browser.close()
    assert errors == []
    assert requests == [page.as_uri()]


def test_plot_curves_draws_every_run() -> None:
    charts = [("token_cosine", "block"), ("rank_residual", "attention")]
    figure = plot_curves(RUNS, charts)
    assert [len(axis.lines) for axis in figure.axes] == [2, 2]
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), [0, 0.2, 0.4, 0.6])
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    np.testing.assert_allclose(band.get_points()[:, 1], [-0.5, 0.8], err_msg="one standard deviation about 0 to 0.3")


def test_plot_attention_is_layers_by_heads() -> None:
    maps = {1: np.random.default_rng(0).random((3, 5, 5)), 6: np.full((3, 5, 5), 0.2)}
    axes = plot_attention(maps).axes
    np.testing.assert_array_equal([axis.images[0].get_array() for axis in axes], [*maps[1], *maps[6]])
    assert [axis.get_title() for axis in axes] == [f"layer {n}, head {head}" for n in (1, 6) for head in (1, 2, 3)]


def printed(what: object, width: int) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 110, 400])
def test_nothing_is_cut_off_or_broken_however_narrow(width: int) -> None:
    before, after = (made_profile(shift=shift, metrics=available_metrics()) for shift in (0, 1))
    tables = (before.table(spread=True), "2.00 ± 0.50", 1), (before.compare(after), "+1.00 ±0.582 │", 3)
    for what, cell, layers in tables:
        text = printed(what, width)
        assert "…" not in text
        pieces = available_metrics() if width == 400 else re.findall("[a-z]+_?", " ".join(available_metrics()))
        assert [name for name in pieces if not re.search(rf"(\b|_){name}", text)] == []
        assert text.count(cell) == layers * len(available_metrics())
        assert max(map(len, text.splitlines())) <= width
        if width == 400:  # one table, one caption
            assert (text.count("┃ layer "), "samples" in text) == (1, True)


def test_a_table_has_the_rows_of_its_columns_only() -> None:
    places = (("block", 1, "token_cosine"), ("final", 1, "norm_spread"))
    readings = tuple(MetricValue(*place, 0.1, 0, 1) for place in places)
    first, second = printed(Profile(readings, {}).table(), 30).split("spread")
    assert ("block" in first, "final" in first) == (True, False)
    assert ("block" in second, "final" in second) == (False, True)


def test_sentences_wrap_and_stay_in_their_table() -> None:
    rows = [{"layer": "1", "short": "x", "why": "word " * 30}]
    text = printed(FittedTable("", rows, "", sentences="why"), 60)
    assert re.search("short.*why", text)
    assert text.count("word") == 30


def test_the_answer_comes_first_and_the_usual_table_fits_80_columns_in_one_piece() -> None:
    profile = made_profile(0.1, metrics=DEFAULT_METRICS, depth=12)
    text = str(profile)
    assert text.splitlines()[0].startswith("Tokens grow alike with depth")
    assert max(map(len, text.splitlines())) <= 80
    assert (text.count("│    12 │"), text.count("cosine ↑"), text.count("rank ↓")) == (1, 1, 1)
    assert "<b>Tokens grow alike" in profile._repr_html_()
    assert "token_cosine ↑" in printed(profile, 200)


@pytest.mark.parametrize(
    ("x", "text"),
    [(0, "0.000"), (0.5, "0.500"), (-0.0123, "-0.012"), (0.00123, "0.0012"), (12.34, "12.3"), (-1234.5, "-1234")],
)
def test_numbers_have_two_or_three_digits(x: float, text: str) -> None:
    assert short(x) == text


def test_notebooks_show_an_escaped_table() -> None:
    html = FittedTable("a < b", [{"layer": "1", "x": "<b>"}], "end")._repr_html_()
    assert "a &lt; b" in html
    assert "<th>x</th>" in html
    assert "<td>&lt;b&gt;</td>" in html
