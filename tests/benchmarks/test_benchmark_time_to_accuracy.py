"""How long training took to be so good, from the records of runs that were never trained."""

import csv
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.evaluate import Evaluation
from acutance.lab.train import Run, override

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "time_to_accuracy.py"
LOG = [
    {"step": 10, "seconds": 4.0, "images/s": 100.0, "loss": 2.0},
    {"step": 20, "seconds": 8.0, "images/s": 300.0, "loss": 1.0, "val/top1": 60.0},
    {"step": 30, "seconds": 12.0, "images/s": 200.0, "loss": 0.5, "val/top1": 72.0},
    {"step": 40, "seconds": 15.5, "images/s": 200.0, "loss": 0.4, "val/top1": 71.0},
]


def made(folder: Path, *changes: str) -> Path:
    run = Run(folder)
    run.begin(override(recipes.load("digits"), list(changes)), "digits", 1)
    run.write_result({"step": 40, "scores": {"top1": 71.0}, "headline": "top1", "best": None})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    Evaluation(
        split="test", weights="last", settings=(), scores={"top1": 70.5}, headline="top1", higher_is_better=True,
        model="", precision="float32", command=(), evaluated="", versions={}, hardware={}, git=None,
    ).save(folder)  # fmt: skip
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, str]]]:
    def call(*words: object) -> list[dict[str, str]]:
        out = tmp_path / "table.csv"
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words), "--out", str(out)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        with out.open(newline="") as file:
            return list(csv.DictReader(file))

    return call


def test_the_first_evaluation_that_is_as_good_counts(
    script: Callable[..., list[dict[str, str]]], tmp_path: Path
) -> None:
    folder = made(tmp_path / "plain", "loop.seed=3")
    (row,) = script(folder, "--reach", 60, "--reach", 71.5, "--reach", 80)
    assert (row["seconds_to_60"], row["seconds_to_71.5"], row["seconds_to_80"]) == ("8.0", "12.0", "")
    assert (row["seconds"], row["median_speed"], row["seed"]) == ("15.5", "200", "3")
    assert (row["test_top1"], row["held_out_top1"]) == ("70.50", "71.00")


def test_a_row_says_what_ran_and_how_it_is_made_again(
    script: Callable[..., list[dict[str, str]]], tmp_path: Path
) -> None:
    """The versions are the run's own, not those of who reads it."""
    folder = made(tmp_path / "plain")
    body = json.loads(Run(folder).record_path.read_text())
    body["sessions"][0]["versions"] = {"python": "3.12.3", "torch": "2.11.0", "numpy": "2.5.2", "triton": "3.6.0"}
    body["sessions"][0]["hardware"] |= {"gpus": ["A toy GPU"], "cuda": "13.0"}
    Run(folder).record_path.write_text(json.dumps(body))
    (row,) = script(folder, "--reach", 60)
    assert row["versions"] == "python 3.12.3, torch 2.11.0, cuda 13.0, triton 3.6.0"
    assert row["device"] == "A toy GPU"
    assert row["command"] == f"python benchmarks/time_to_accuracy.py {folder} --reach 60"


def test_without_a_gpu_there_is_neither_cuda_nor_triton(
    script: Callable[..., list[dict[str, str]]], tmp_path: Path
) -> None:
    folder = made(tmp_path / "plain")
    body = json.loads(Run(folder).record_path.read_text())
    body["sessions"][0]["versions"] = {"python": "3.11.7", "torch": "2.13.0"}
    body["sessions"][0]["hardware"]["cuda"] = None
    Run(folder).record_path.write_text(json.dumps(body))
    (row,) = script(folder)
    assert row["versions"] == "python 3.11.7, torch 2.13.0"


def test_what_was_trained_on_is_not_held_out(script: Callable[..., list[dict[str, str]]], tmp_path: Path) -> None:
    folder = made(tmp_path / "all", "task.train_on=all", "task.model.mitigation=neutreno:0.6")
    (row,) = script(folder, "--reach", 60)
    assert (row["seconds_to_60"], row["held_out_top1"]) == ("", "")
    assert (row["seconds"], row["test_top1"], row["mitigation"]) == ("15.5", "70.50", "neutreno:0.6")


def test_a_run_that_went_on_is_refused(script: Callable[..., list[dict[str, str]]], tmp_path: Path) -> None:
    folder = made(tmp_path / "cut")
    Run(folder).go_on(Run(folder).config(), 1)
    with pytest.raises(AcutanceError, match="interrupted"):
        script(folder)
