"""`acutance evaluate` on a run of real digits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import acutance as ac
from acutance import recipes
from acutance.cli import app
from acutance.data import load_images
from acutance.errors import AcutanceError
from acutance.runs.evaluate import evaluate_run, read_evaluation
from acutance.train import Run, override, train

SMALL = ["task.model.depth=2", "task.model.dim=12", "loop.epochs=2", "loop.monitor_every=none", "loop.ema=none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(override(recipes.load("digits"), SMALL), folder, recipe="digits", device="cpu")
    return folder


def accuracy(model, split):
    """By hand: bytes to numbers, then the share of first guesses that are right."""
    images = load_images("digits", None, split)
    mean, std = torch.tensor(images.mean)[:, None, None], torch.tensor(images.std)[:, None, None]
    with torch.no_grad():
        guesses = model.eval()((images.images / 255 - mean) / std).argmax(-1)
    return 100 * float((guesses == images.labels).double().mean())


def test_scores_are_those_of_the_test_set(run):
    found = evaluate_run(run, device="cpu")
    assert found.scores["top1"] == pytest.approx(accuracy(ac.load(run / "model.safetensors"), "test"))
    assert read_evaluation(run, "test") == found


def test_other_splits(run):
    found = evaluate_run(run, split="val", device="cpu")
    assert found.scores["top1"] == pytest.approx(Run(run).result()["scores"]["top1"])


def test_the_best_model_is_another_file(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    torch.manual_seed(1)
    other = ac.models.ViT(**ac.load(copy / "model.safetensors").config.to_dict())
    ac.save(other, copy / "best.safetensors")
    best, last = (evaluate_run(copy, weights=weights, device="cpu").scores["top1"] for weights in ("best", "last"))
    assert best == pytest.approx(accuracy(other, "test"))
    assert best != last


def test_an_evaluation_fits_its_weights_and_settings_only(run, tmp_path):
    found = evaluate_run(run, device="cpu")
    assert found.fits(run, "last", ())
    assert not found.fits(run, "last", ("task.fraction=0.5",))
    copy = tmp_path / "other"
    copy.mkdir()
    (copy / "run.json").write_bytes((run / "run.json").read_bytes())
    (copy / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes() + b"x")
    assert not found.fits(copy, "last", ())


def test_the_command_records_what_it_needs(run, tmp_path):
    done = CliRunner().invoke(app, ["evaluate", str(run), "--device", "cpu", "--json", str(tmp_path / "scores.json")])
    assert done.exit_code == 0, done.output
    assert "top1" in done.output
    body = json.loads((tmp_path / "scores.json").read_text())
    assert body["versions"]["torch"] == torch.__version__
    assert {"command", "hardware", "git", "scores", "split", "weights", "model"} <= body.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "vall"}, "no split 'vall'"),
        ({"weights": "first"}, "weights are last or best"),
        ({"settings": ("task.modell=1",)}, "did you mean model"),
    ],
)
def test_mistakes_are_said(run, options, message):
    with pytest.raises(AcutanceError, match=message):
        evaluate_run(run, device="cpu", **options)


def test_what_is_no_finished_run_is_said(tmp_path):
    with pytest.raises(AcutanceError, match="is no run"):
        evaluate_run(tmp_path)
    Run(tmp_path).begin(recipes.load("digits"), "digits", 1)
    with pytest.raises(AcutanceError, match=r"not finished\. To go on: acutance train --out"):
        evaluate_run(tmp_path)


@pytest.mark.parametrize("options", [{"split": "val"}, {"weights": "best"}], ids=str)
def test_a_run_is_not_scored_by_what_it_was_trained_on(run, tmp_path, options):
    seen = tmp_path / "seen"
    Run(seen).begin(override(recipes.load("digits"), [*SMALL, "task.train_on=all"]), "digits", 1)
    for name in ("model.safetensors", "best.safetensors"):
        shutil.copy(run / name, seen / name)
    with pytest.raises(AcutanceError, match="was trained on all of its training set"):
        evaluate_run(seen, device="cpu", **options)
