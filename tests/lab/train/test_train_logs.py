"""What a run tells: a bar where there is a terminal, lines where there is none, and a log that is JSON."""

import io
import json
import math
import re

import pytest
from rich.console import Console
from train_worlds import fit, tiny

from acutance.lab.train import log
from acutance.lab.train.log import Bar, Log, read_log

LINE = r"^step \d+ of 16  epoch \d\.\d\d  loss \d\.\d{4}  [\d,]+ images/s  \d:\d\d:\d\d left$"


def shown_in_a_terminal(**options):
    output = io.StringIO()
    bar = Bar(Console(file=output, force_terminal=True, width=160), first=2, total=8, unit="images", **options)
    with bar:
        for _ in range(3):
            bar.advance(16)
        bar.tell(epoch=1.25, loss=0.5, speed=12345.6)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


def test_the_bar_shows_how_far_how_fast_and_how_long():
    assert re.search(
        r"epoch 1\.25  loss 0\.5000 .*5/8 12,346 images/s 0:00:00 left [\d:-]+", shown_in_a_terminal(shown=True)
    )


def test_other_processes_show_nothing():
    assert shown_in_a_terminal(shown=False).strip() == ""


def test_without_a_terminal_there_is_a_line_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "SECONDS_BETWEEN_LINES", 0)
    _, printed = fit(tiny(), tmp_path / "often")
    assert len(re.findall(LINE, printed, re.MULTILINE)) >= 4
    monkeypatch.setattr(log, "SECONDS_BETWEEN_LINES", 3600)
    _, printed = fit(tiny(), tmp_path / "seldom")
    assert not re.findall(LINE, printed, re.MULTILINE)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_is_null_in_the_log(tmp_path, value):
    log = Log(tmp_path, 0)
    log.write(1, {"loss": 0.5, "val/perplexity": value})
    log.close()
    assert read_log(tmp_path) == [{"step": 1, "loss": 0.5, "val/perplexity": None}]
    assert json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)["loss"] == 0.5
