"""`acutance bench` at toy size: every group runs, and its file says what it holds."""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from acutance import cli
from acutance.bench import run, steps
from acutance.bench.cli import bench
from acutance.bench.results import Row
from acutance.bench.settings import Settings, Table
from acutance.bench.timing import Pace
from acutance.errors import AcutanceError

CPU = Settings("cpu")


@pytest.fixture
def command() -> Callable[..., str]:
    app = typer.Typer()
    app.command()(bench)

    def call(*words: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == status, done.output
        return done.output

    return call


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("group", run.GROUPS)
def test_every_group_runs_and_names_its_file(group: str, command: Callable[..., str], tmp_path: Path) -> None:
    text = command("--only", group, "--device", "cpu", "--out", str(tmp_path))
    assert "toy sizes on the CPU" in text
    assert "Summary" in text
    version = torch.__version__.split("+")[0]
    rows = read(tmp_path / f"bench-{group}-cpu-float32-torch{version}.csv")
    for row in rows:
        assert float(row["ms"]) > 0, row
        assert "toy size" in row["device"]
        assert row["command"] == f"acutance bench --only {group}"
    for table in {row["table"] for row in rows}:
        found = [row for row in rows if row["table"] == table]
        assert found[0]["ratio"] == "1.0000"
        assert any(row["ratios"] for row in found)


def test_without_timm_the_output_says_what_the_baseline_is(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(steps, "find_spec", lambda _name: None)
    command("--only", "steps-32", "--device", "cpu", "--out", str(tmp_path))
    (path,) = tmp_path.iterdir()
    first, *others = read(path)
    assert first["variant"] == "plain ViT"
    assert "timm is not installed" in first["note"]
    variants = ("", ", tokens in bfloat16 between blocks", ", no fused kernel")
    assert {row["variant"] for row in others} == {"plain ViT", *(f"NeuTRENO{variant}" for variant in variants)}


def test_on_a_gpu_every_mode_of_timm_is_a_baseline_at_the_sizes_of_the_papers() -> None:
    """Only what would be timed is looked at: nothing is built."""
    shape, settings = steps.SHAPES["steps-32"], Settings("cuda:0")
    found = steps.candidates(shape, steps.training, settings, timm=True)
    assert [(c.variant, c.mode, c.baseline, c.static) for c in found] == [
        ("timm's ViT", "default", True, False),
        ("timm's ViT", "reduce-overhead", True, True),
        ("plain ViT", "reduce-overhead", False, True),
        ("NeuTRENO", "default", False, False),
        ("NeuTRENO", "reduce-overhead", False, True),
        ("NeuTRENO, tokens in bfloat16 between blocks", "reduce-overhead", False, True),
        ("NeuTRENO, no fused kernel", "reduce-overhead", False, True),
    ]
    titles = [table.title for name in steps.SHAPES for table in steps.tables(settings, name)]
    assert titles == [
        "ViT-Ti/4, 32×32, batch 1024, training",
        "ViT-Ti/4, 32×32, batch 1024, inference",
        "DeiT-Ti/16, 224×224, batch 512, training",
        "DeiT-Ti/16, 224×224, batch 512, inference",
    ]


def test_the_help_names_every_group() -> None:
    text = CliRunner().invoke(cli.app, ["bench", "--help"]).output
    assert all(name in text for name in run.GROUPS)


def test_groups_by_name_and_by_beginning() -> None:
    assert run.chosen_groups(None) == list(run.GROUPS)
    assert run.chosen_groups("micro,steps") == ["micro", "steps-32", "steps-224"]
    with pytest.raises(AcutanceError, match=r"'speed'.*known: steps-32"):
        run.chosen_groups("speed")


def growing(error: BaseException) -> Callable[[Settings], list[Table]]:
    def rows() -> Iterator[list[Row]]:
        yield [{"variant": "plain", "ms": "2.0", "ratio": "1.0000"}]
        raise error

    return lambda _settings: [Table("stops", rows)]


def test_what_is_done_stays_when_a_table_fails_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "GROUPS", {"a": growing(RuntimeError("out of memory")), "b": growing(RuntimeError("x"))})
    first, second = run.run_groups(["a", "b"], CPU, tmp_path, Console(quiet=True))
    assert [row["note"] for row in read(first)] == ["", "stopped: out of memory"]
    assert read(second)[0]["ms"] == "2.0"


def test_an_interruption_keeps_what_is_done(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "GROUPS", {"a": growing(KeyboardInterrupt())})
    text = command("--only", "a", "--device", "cpu", "--out", str(tmp_path), status=130)
    assert "Stopped" in text
    (path,) = tmp_path.iterdir()
    assert [row["variant"] for row in read(path)] == ["plain"]


def test_the_summary_has_the_fastest_mode_at_the_most_tokens() -> None:
    shared = {"table": "t", "variant": "ours", "ratio": "1.0"}
    rows = [
        {**shared, "mode": "slow", "ms": "3.0", "tokens": 8},
        {**shared, "mode": "fast", "ms": "2.0", "tokens": 8},
        {**shared, "mode": "fast", "ms": "1.0", "tokens": 4},
        {"table": "t", "variant": "left out", "note": "out of memory"},
    ]
    text = io.StringIO()
    Console(width=200, file=text).print(run.headlines(rows))
    assert "2.0" in text.getvalue()
    assert "3.0" not in text.getvalue()
    assert "left out" not in text.getvalue()


def test_quick_has_fewer_repetitions_and_the_cpu_the_fewest() -> None:
    assert Settings("cuda").pace() == Pace(repetitions=7, steps=12, warm_up=5, refresh=2)
    assert Settings("cuda", quick=True).pace().repetitions == 2
    assert Settings("cpu").pace(steps=50, calls=10) == Pace(repetitions=2, steps=1, warm_up=1, refresh=0, calls=10)
