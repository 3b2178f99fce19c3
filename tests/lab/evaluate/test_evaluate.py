"""`acutance evaluate` on a run of real digits, and what a task says its scores depend on."""

import json
from dataclasses import is_dataclass, replace
from functools import partial

import pytest
import torch

import acutance as ac
import standins
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.evaluate.evaluate import DATA, ELSEWHERE, evaluate_run, read_evaluation, task_of
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import Run, override, train
from forked import run_as_torchrun


def test_scores_are_those_of_the_split_and_recorded_with_what_they_need(run, tmp_path, command):
    assert "top1" in command("evaluate", run, "--device", "cpu", "--json", tmp_path / "scores.json")
    body = json.loads((tmp_path / "scores.json").read_text())
    assert body["versions"]["torch"] == torch.__version__
    assert {"command", "hardware", "git", "scores", "split", "weights", "model"} <= body.keys()
    found = evaluate_run(run, device="cpu")
    task = task_of(Run(run).config(), "cpu")
    assert found.scores == task.evaluate(ac.load(run / "model.safetensors"), split="test")
    assert read_evaluation(run, "test") == found
    found = evaluate_run(run, split="val", device="cpu")
    assert found.scores["top1"] == pytest.approx(Run(run).result()["scores"]["top1"])


def test_the_best_model_is_another_file_with_scores_of_its_own(copy):
    torch.manual_seed(1)
    other = ac.models.ViT(**ac.load(copy / "model.safetensors").config.to_dict())
    ac.save(other, copy / "best.safetensors")
    last, best = (evaluate_run(copy, weights=weights, device="cpu") for weights in ("last", "best"))
    assert last.scores["top1"] != best.scores["top1"]
    assert best.scores == task_of(Run(copy).config(), "cpu").evaluate(other, split="test")
    for found in (last, best):
        assert read_evaluation(copy, "test", found.weights) == found
        assert (copy / f"evaluation-test-{found.weights}.json").is_file()
    # An evaluation of other weights does not count.
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes() + b"x")
    assert read_evaluation(copy, "test") is None


def test_what_was_changed_is_in_the_name_and_what_was_not_is_not(tmp_path):
    """A language model of a few parameters, whose evaluation has something to choose."""
    config = standins.shrink(recipes.load("wikitext103"), tmp_path / "text")
    run, stride = tmp_path / "run", ("task.test_stride=4",)
    train(override(config, ["task.test_stride=8"]), run, recipe="wikitext103", device="cpu")
    own = ("task.test_stride=8", "task.windows=100", "task.val_stride=4")  # the run's own, none of the scores', val's
    finer, plain = (evaluate_run(run, settings=settings, device="cpu") for settings in (stride, own))
    names = {path.name for path in run.glob("evaluation-test-*.json")}
    assert names == {"evaluation-test-last.json", "evaluation-test-last-task.test_stride=4.json"}
    assert (finer.settings, plain.settings) == (stride, ())
    assert finer.scores["perplexity"] != plain.scores["perplexity"]
    assert read_evaluation(run, "test", settings=stride) == finer
    assert read_evaluation(run, "test", settings=("task.test_stride=2",)) is None
    for values in (("a/b", "a:b"), ("x" * 100, "x" * 101)):  # of signs or of a length that make no name
        paths = {replace(plain, settings=(f"task.weights={value}",)).path(run) for value in values}
        assert len(paths) == 2
        assert {path.parent for path in paths} == {run}
        assert max(len(path.name) for path in paths) < 150


@pytest.mark.slow
def test_processes_of_torchrun_share_the_work_and_find_the_same(run, copy):
    """In three chunks of images, the last of them smaller: one process has more to do."""
    chunks = partial(setattr, ClassificationTask, "evaluated_at_once", 150)
    both = run_as_torchrun(["evaluate", copy, "--device", "cpu"], prepare=chunks)
    assert [done.returncode for done in both] == [0, 0], both
    assert [done.stdout.count("wrote ") for done in both] == [1, 0]
    found, expected = read_evaluation(copy, "test"), evaluate_run(run, device="cpu")
    assert (found.processes, expected.processes) == (2, 1)
    assert found.scores == pytest.approx(expected.scores, rel=1e-6)


def test_mistakes_are_said(run, copy, tmp_path, command):
    Run(tmp_path / "begun").begin(recipes.load("digits"), "digits", 1)
    Run(copy).begin(override(Run(run).config(), ["task.train_on=all"]), "digits", 1)
    # The model comes from its file: a score would be called by a change that was never made.
    changes = ("task.model.mitigation=neutreno:5", "task.train_on=train", "task.dataset=cifar10")
    for folder, options, message in (
        (run, {"split": "vall"}, "no split 'vall'"),
        (run, {"weights": "first"}, "weights are last or best"),
        (run, {"settings": ("task.modell=1",)}, "did you mean model"),
        *((copy, {"settings": (s,)}, f"cannot change {s.partition('=')[0]}: .*takes task.data_dir$") for s in changes),
        (tmp_path / "nowhere", {}, "is no run"),
        (tmp_path / "begun", {}, r"not finished\. To go on: acutance train --out"),
        *((copy, seen, "was trained on all of its training set") for seen in ({"split": "val"}, {"weights": "best"})),
    ):
        with pytest.raises(AcutanceError, match=message):
            evaluate_run(folder, device="cpu", **options)
    assert not list(copy.glob("evaluation-*task*"))
    with pytest.raises(AcutanceError, match=r"--multi-scale is for runs of segmentation; .* one of classification"):
        command("evaluate", run, "--multi-scale", "--device", "cpu")


class Watched:
    """A configuration that notes which of its fields are read, by dotted name."""

    def __init__(self, config, noted, prefix=""):
        self._config, self._noted, self._prefix = config, noted, prefix

    def __getattr__(self, name):
        value = getattr(self._config, name)
        if is_dataclass(value):
            return Watched(value, self._noted, f"{self._prefix}{name}.")
        self._noted.add(self._prefix + name)
        return value


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("digits", []), ("deit_tiny", []), ("ade20k", ["task.encoder_weights=none"]), ("wikitext103", [])],
)
def test_evaluation_reads_what_its_task_says(tmp_path, recipe, changes):
    task = task_of(override(standins.shrink(recipes.load(recipe), tmp_path), changes), "cpu")
    torch.manual_seed(0)
    model, own = task.build_model(), task.config
    when_made = {"corpus"}  # the text is read with the task
    without_effect = {"held_out_every"}  # handed on with any split, and used on training images alone
    for split in ("train", "val", "test"):
        noted = set()
        task.config = Watched(own, noted)
        task.evaluate(model, split=split)
        read = {name for name in noted if not name.startswith("model.") and f"task.{name}" not in ELSEWHERE}
        said = set(task.evaluated_by(split))
        assert said - when_made == read - (without_effect if split == "test" else set())
        assert {f"task.{name}" for name in said & when_made} <= DATA
