import json
import re
import shutil

import pytest

from acutance.errors import AcutanceError
from acutance.lab import recipes
from forked import run_forked

TINY = ["--device", "cpu"]
for change in ("task.model.depth=1", "task.model.dim=6", "task.fraction=0.1", "loop.epochs=1", "loop.batch_size=32"):
    TINY += ["--set", change]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, command):
    folder = tmp_path_factory.mktemp("cli") / "run"
    changes = ("--set", "loop.checkpoint_every=2", "--set", "loop.keep_last=9")
    return folder, command("train", "digits", *TINY, *changes, "--out", folder, "--strategy", "single")


def test_a_recipe_is_listed_trained_and_recorded(trained, command):
    assert all(name in command("train", "--list") for name in recipes.names())
    folder, printed = trained
    assert re.search(r"loss \d\S+  val: top1 \S+ .*loss", printed)  # two losses, told apart
    assert re.search(r"top1 \d.* on the held-out slice after step 4", printed)
    record = json.loads((folder / "run.json").read_text())
    config = record["config"]
    assert (record["recipe"], config["task"]["model"]["depth"], config["loop"]["strategy"]) == ("digits", 1, "single")
    with pytest.raises(AcutanceError, match="was begun with the recipe digits, not other"):
        command("train", "other", "--out", folder, "--resume")


def test_a_run_that_ends_where_it_stands_is_scored_there(trained, tmp_path, command):
    """A checkpoint of before the first evaluation has no scores."""
    run = shutil.copytree(trained[0], tmp_path / "run")
    shutil.rmtree(run / "checkpoints/step-000000004")
    (run / "result.json").unlink()  # as if it had been stopped there
    printed = command("train", "--out", run, "--resume", "--set", "loop.epochs=0.5", "--device", "cpu")
    assert re.search(r"top1 \d.* on the held-out slice after step 2", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a recipe"),
        (("digitz",), r"no recipe 'digitz', did you mean digits\?"),
        (("digits", "--resume"), "name its folder with --out"),
        (("digits", "--strategy", "dpp"), r"loop.strategy is one of auto, single, ddp, fsdp.*did you mean ddp\?"),
        (("digits", "--device", "tpu", "--out", "OUT"), "a device is cpu, cuda or auto"),
        (("digits", "--processes", "2", "--strategy", "single", "--out", "OUT"), "several processes need"),
        (("digits", "SRUN", "--out", "OUT"), "srun started 2 tasks"),  # they would train one run each, in one folder
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, command, arguments, message):
    for name, value in {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items() if "SRUN" in arguments else ():
        monkeypatch.setenv(name, value)
    arguments = [str(tmp_path / "run") if word == "OUT" else word for word in arguments if word != "SRUN"]
    with pytest.raises(AcutanceError, match=message):
        command("train", *arguments)
    assert not (tmp_path / "run").exists()


def test_only_we_speak_and_a_slice_that_was_trained_on_is_not_called_held_out(tmp_path):
    """In a process of its own, where nothing has changed Fabric's loggers yet."""
    changes = ("--set", "loop.precision=bf16", "--set", "task.train_on=all")
    done = run_forked("train", "digits", *TINY, *changes, "--out", tmp_path / "run")
    assert done.stdout.startswith("ViT of ")
    assert done.stderr == ""
    words = r"on a slice that was trained on \(task.train_on=all\) after step .* on the test set"
    assert re.search(words, done.stdout)
    assert "held-out" not in done.stdout
