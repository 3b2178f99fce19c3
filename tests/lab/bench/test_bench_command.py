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
from acutance.cli.bench import bench
from acutance.errors import AcutanceError
from acutance.lab.bench import measuring, run, steps, throughput
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table
from acutance.lab.bench.timing import Pace

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
    left_out = {row["variant"] for row in rows if row["note"].startswith("left out")}
    assert left_out == ({"plain, SDPA cuDNN"} if group == "long-training" else set())  # which no CPU has
    for row in rows:
        assert row["variant"] in left_out or float(row["ms"]) > 0, row
        assert "toy size" in row["device"]
        assert row["command"] == f"acutance bench --only {group}"
    for table in {row["table"] for row in rows}:
        found = [row for row in rows if row["table"] == table]
        assert found[0]["ratio"] == "1.0000"
        assert (found[-1]["variant"] == "floor of the plain model") == group.startswith(("steps", "long-training"))
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
    names = ("", ", tokens in bfloat16 between blocks", ", no fused kernel")
    variants = {row["variant"] for row in others}
    assert variants == {"plain ViT", *(f"NeuTRENO{name}" for name in names), "floor of the plain model"}


def test_on_a_gpu_every_mode_of_timm_is_a_baseline_at_the_sizes_of_the_papers() -> None:
    """Only what would be timed is looked at: nothing is built."""
    shape, settings = steps.SHAPES["steps-32"], Settings("cuda:0")
    found = steps.candidates(shape, True, settings, timm=True)
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


def test_the_baseline_may_be_tuned_for_as_long_as_it_takes() -> None:
    settings = Settings("cuda:0", quick=True, max_autotune=True)
    found = steps.candidates(steps.SHAPES["steps-224"], True, settings, timm=True)
    tuned = [(c.variant, c.static) for c in found if c.mode == "max-autotune"]
    assert tuned == [("timm's ViT", True)]
    assert settings.options == " --quick --max-autotune"
    assert Settings("cpu", max_autotune=True).baseline_modes == ("eager",)


def test_on_a_gpu_every_spectrum_is_timed_in_the_mode_of_its_baseline() -> None:
    """And those that call a library come last."""
    found = steps.eigen_candidates(steps.SHAPES["steps-32"], Settings("cuda:0"))
    assert [(c.variant.rpartition("=")[2], c.mode, c.baseline) for c in found] == [
        ("plain ViT", "reduce-overhead", True),
        ("polar", "reduce-overhead", False),
        ("cayley", "reduce-overhead", False),
        ("householder", "reduce-overhead", False),
        ("qr", "reduce-overhead", False),
    ]


@pytest.mark.parametrize("batch", throughput.BATCHES)
def test_on_a_gpu_steps_are_recorded_and_at_one_size_launched_too(batch: int) -> None:
    found = [(c.variant, c.mode, c.baseline, c.static) for c in throughput.candidates(batch, Settings("cuda:0"))]
    assert found[:2] == [("plain ViT", "recorded", True, True), ("NeuTRENO", "recorded", False, True)]
    launched = [("plain ViT", "launched", True, False), ("NeuTRENO", "launched", False, False)]
    assert found[2:] == (launched if batch == 1024 else [])
    (table,) = throughput.tables(Settings("cuda:0"), batch)
    assert table.title == f"ViT-Ti/4, 32×32, end to end, batch {batch}"


def test_what_takes_longest_and_has_no_target_is_measured_last() -> None:
    titles = [table.title for table in measuring.tables(Settings("cuda:0"))]
    assert titles[0] == "measuring DeiT-Ti/16, 224×224, batch 256"
    assert titles[-1] == "measuring DeiT-Ti/16, 224×224, batch 32, spectral metrics"


def test_the_help_names_every_group() -> None:
    text = CliRunner().invoke(cli.app, ["bench", "--help"]).output
    assert all(name in text for name in run.GROUPS)


def test_groups_by_name_and_by_beginning() -> None:
    assert run.chosen_groups(None) == list(run.GROUPS)
    assert run.chosen_groups("micro, steps") == ["micro", "steps-32", "steps-224"]
    assert run.chosen_groups("end-to-end-512") == ["end-to-end-512"]
    assert run.chosen_groups("end-to-end") == [f"end-to-end-{batch}" for batch in (256, 512, 1024, 2048)]
    with pytest.raises(AcutanceError, match=r"'speed'.*known: steps-32"):
        run.chosen_groups("speed")


def growing(error: BaseException) -> Callable[[Settings], list[Table]]:
    def rows() -> Iterator[list[Row]]:
        yield [{"variant": "plain", "ms": "2.0", "ratio": "1.0000"}]
        raise error

    return lambda _settings: [Table("stops", rows)]


def test_what_is_done_stays_when_a_table_fails_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = (RuntimeError("out of memory"), AcutanceError("no recording"), AttributeError("another version"))
    monkeypatch.setattr(run, "GROUPS", {str(error): growing(error) for error in errors})
    written = run.run_groups(list(run.GROUPS), CPU, tmp_path, Console(quiet=True))
    for path, error in zip(written, errors, strict=True):
        rows = read(path)
        assert rows[0]["ms"] == "2.0"
        assert [row["note"] for row in rows] == ["", f"stopped: {error}"]
    assert "AttributeError: another version" in capsys.readouterr().err


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
    assert Settings("cuda", quick=True).pace() == Pace(repetitions=4, steps=6, warm_up=5, refresh=2)
    assert Settings("cuda", quick=True).pace(steps=1, repetitions=3) == Pace(repetitions=3, steps=1, warm_up=5)
    assert Settings("cpu").pace(steps=50, calls=10) == Pace(repetitions=2, steps=1, warm_up=1, refresh=0, calls=10)
