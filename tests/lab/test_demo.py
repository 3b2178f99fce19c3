import io
import json
import shutil
from html import escape

import pytest
import torch
from rich.console import Console

import acutance as ac
from acutance.diagnose.quality import Quality
from acutance.lab.demo import VARIANTS, conclude, run_demo
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import Run
from acutance.lab.train.loop import Loop
from acutance.measure.profile import MetricValue, Profile

TOY = ("task.model.depth=2", "task.model.dim=12", "task.model.heads=2", "loop.epochs=1", "loop.batch_size=256")


def run(folder, *changes, seeds=1):
    console = Console(record=True, width=200, file=io.StringIO())
    runs = run_demo(folder, seeds=seeds, changes=[*TOY, *changes], console=console)
    return runs, console.export_text()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "two seeds"
    return folder, *run(folder, seeds=2)


def figures(runs, seed):
    return {variant: (done[seed][0], done[seed][1].readings) for variant, done in runs.items()}


def test_accuracy_is_the_tasks_own(shown):
    folder, runs, _ = shown
    for (quality, _), seed in zip(runs["plain"], (0, 1), strict=True):
        found = Run(folder / f"plain-seed{seed}")
        task = ClassificationTask(found.config().task, seed=0, device=torch.device("cpu"))
        assert quality.mean == pytest.approx(task.evaluate(ac.load(found.model_path), split="test")["top1"])


def test_writes_runs_profiles_and_one_page(shown):
    folder, runs, text = shown
    places = {f"{variant}-seed{seed}" for variant in ("plain", "neutreno", "neutreno-featscale") for seed in (0, 1)}
    assert {path.name for path in folder.iterdir()} == places | {"report.html", "report.png", "results.json"}
    results = json.loads((folder / "results.json").read_text())
    assert results["accuracy"]["plain"] == [accuracy.mean for accuracy, _ in runs["plain"]]
    assert results["verdict"] in " ".join(text.split())
    assert all(variant in results["verdict"] for variant in VARIANTS)
    assert [row["variant"] for row in results["summary"]] == list(VARIANTS)
    assert "seeds/plain-seed0: 2 layers" in " ".join(text.split()), "it ends with a diagnosis of the plain model"
    assert "±" in results["summary"][0]["accuracy %"]
    assert escape(results["verdict"]) in (folder / "report.html").read_text()
    assert ac.load(folder / "neutreno-seed1/model.safetensors").config.mitigation == "neutreno:0.6"
    assert Profile.load(folder / "neutreno-seed1/profile.json") == runs["NeuTRENO"][1][1]
    assert runs["plain"][0][1].readings != runs["plain"][1][1].readings  # the seeds decide


def test_finished_runs_are_reused_and_damaged_or_other_ones_trained_again(shown, tmp_path, monkeypatch):
    folder, runs, _ = shown
    copied = shutil.copytree(folder, tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", lambda *_: pytest.fail("trained again"))
        again, text = run(copied, seeds=2)
        with pytest.raises(pytest.fail.Exception):
            run(shutil.copytree(folder, tmp_path / "other"), "optim.lr=1e-4")
    assert text.count("reusing") == 6
    assert figures(again, 1) == figures(runs, 1)
    (copied / "neutreno-seed0/run.json").write_text("[]")
    (copied / "neutreno-featscale-seed0/model.safetensors").unlink()
    again, text = run(copied)
    assert text.count("reusing") == 1
    assert figures(again, 0) == figures(runs, 0)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([90.0], [95.0], "raised test accuracy in % (90.00 → 95.00)"),
        ([90.0], [90.5], "did not clearly change test accuracy in % (90.00 → 90.50)"),  # two images of 400
        ([90.0], [90.0], "did not clearly change test accuracy in %"),
        ([90.0, 91.0], [85.0, 86.0], "lowered test accuracy in % (90.50 → 85.50)"),
        ([90.0, 95.0, 92.0], [96.0, 95.0, 90.0], "did not clearly change test accuracy in %"),
    ],
)
def test_the_sentence_follows_the_numbers_and_their_spread(before, after, said):
    profile = Profile((MetricValue("block", 12, "token_cosine", 0.5, 0.1, 3),))

    def trained(accuracy):  # of 400 images, the first of which are right
        right = round(4 * accuracy)
        return Quality("accuracy", True, (100.0,) * right + (0.0,) * (400 - right), (1.0,) * 400), profile

    sentence = conclude({"plain": [*map(trained, before)], "NeuTRENO": [*map(trained, after)]})
    assert said in sentence
    assert "did not clearly change token cosine after the last block (0.500 → 0.500)" in sentence
    assert ("one seed" in sentence) == (len(before) == 1)
