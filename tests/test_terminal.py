"""Tables for terminals of any width."""

import re

import pytest
from rich.console import Console
from rich.table import Table

import acutance as ac
from acutance.explain import Spectrum
from acutance.measure import available_metrics
from acutance.profile import Profile, Reading
from acutance.report.compare import side_by_side
from acutance.terminal import FittedTable


def printed(what: object, width: int) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def profile(mean: float) -> Profile:
    metrics = [*available_metrics()]
    readings = [Reading("block", layer, name, mean + layer, 0.5, 3) for name in metrics for layer in (1, 2)]
    return Profile(tuple(readings), {"model": "ViT", "samples": 3})


@pytest.mark.parametrize("width", [60, 80, 110, 400])
def test_nothing_is_cut_off_or_broken_however_narrow(width: int) -> None:
    before, after = profile(0.0), profile(1.0)
    for what, cell in ((before.table(), "2.0000 ± 0.5000"), (side_by_side(before, after), "2.0000 → 3.0000")):
        text = printed(what, width)
        assert "…" not in text
        assert [name for name in available_metrics() if not re.search(rf"\b{name}\b", text)] == []
        assert text.count(cell) == len(available_metrics())
        assert max(map(len, text.splitlines())) <= width


def test_with_room_it_is_one_table() -> None:
    text = printed(profile(0.0).table(), 400)
    assert text.count("layer") == 1
    assert text.count("3 samples, mean ± standard deviation") == 1


def test_a_table_has_the_rows_of_its_columns_only() -> None:
    readings = (Reading("block", 1, "token_cosine", 0.1, 0, 1), Reading("map", 1, "attention_entropy", 0.2, 0, 1))
    first, second = printed(Profile(readings, {}).table(), 40).split("attention_entropy")
    assert ("block" in first, "map" in first) == (True, False)
    assert ("block" in second, "map" in second) == (False, True)


@pytest.mark.parametrize("width", [80, 110])
def test_a_spectrum_with_data_can_be_read(width: int) -> None:
    model = ac.models.ViT(image_size=8, patch_size=4, in_chans=1, dim=12, depth=2, heads=2, num_classes=2)
    images = ac.data.load_images("digits", None, "test").images[:4].float()
    found: Spectrum = ac.explain(model, [images], progress=False)
    text = printed(found.table(), width)
    assert "…" not in text
    for row in found.rows():
        for column, cell in row.items():
            assert column == "reason" or (column in text and cell in text)


def test_sentences_are_wrapped_and_not_put_off() -> None:
    def build(columns):
        table = Table(*columns)
        table.add_row(*("x" if column == "short" else "word " * 30 for column in columns))
        return table

    text = printed(FittedTable(build, ["short", "why"], "", sentences="why"), 60)
    assert re.search("short.*why", text)
    assert text.count("word") == 30
