"""`acutance train` as a command."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.lab import recipes

TINY = ["--device", "cpu"]
for change in ("task.model.depth=1", "task.model.dim=6", "task.fraction=0.1", "loop.epochs=1", "loop.batch_size=32"):
    TINY += ["--set", change]


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_the_list_names_every_recipe():
    printed = invoke("--list").output
    assert recipes.names()
    for name in recipes.names():
        assert name in printed


def test_a_recipe_is_trained_recorded_and_resumed(tmp_path):
    done = invoke("digits", *TINY, "--out", tmp_path / "run", "--strategy", "single")
    assert done.exit_code == 0, done.output
    assert re.search(r"loss \d\S+  val: top1 \S+ .*loss", done.output)  # two losses, told apart
    assert re.search(r"top1 \d.* on the held-out slice after step 4", done.output)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["recipe"] == "digits"
    assert record["config"]["task"]["model"]["depth"] == 1
    assert record["config"]["loop"]["strategy"] == "single"
    longer = invoke("--out", tmp_path / "run", "--resume", "--set", "loop.epochs=2", "--device", "cpu")
    assert longer.exit_code == 0, longer.output
    assert "after step 8" in longer.output


def test_a_run_is_never_cut_short_afterwards(tmp_path):
    """It would be scored, and kept, as what it is not."""
    out = tmp_path / "run"
    assert invoke("digits", *TINY, "--set", "loop.epochs=2", "--out", out).exit_code == 0
    record, result = (out / "run.json").read_bytes(), (out / "result.json").read_bytes()
    error = invoke("--out", out, "--resume", "--set", "loop.epochs=1", "--device", "cpu").exception
    assert isinstance(error, AcutanceError)
    assert re.search(r"run is 8 steps far, and loop.epochs=1 ends after 4", str(error))
    assert ((out / "run.json").read_bytes(), (out / "result.json").read_bytes()) == (record, result)


def test_a_run_that_ends_where_it_stands_is_scored_there(tmp_path):
    """A checkpoint of before the first evaluation has no scores."""
    out = tmp_path / "run"
    assert (
        invoke("digits", *TINY, "--set", "loop.checkpoint_every=2", "--set", "loop.keep_last=9", "--out", out).exit_code
        == 0
    )
    shutil.rmtree(out / "checkpoints/step-000000004")
    (out / "result.json").unlink()  # as if it had been stopped there
    ended = invoke("--out", out, "--resume", "--set", "loop.epochs=0.5", "--device", "cpu")
    assert ended.exit_code == 0, ended.output
    assert re.search(r"top1 \d.* on the held-out slice after step 2", ended.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a recipe"),
        (("digitz",), r"no recipe 'digitz', did you mean digits\?"),
        (("digits", "--set", "optim.lrr=1"), r"did you mean lr\?"),
        (("digits", "--set", "epochs=1"), r"no field 'epochs', did you mean loop\.epochs\?; known: task, optim"),
        (("digits", "--set", "depth=1"), r"no field 'depth', did you mean task\.model\.depth\?"),
        (("digits", "--resume"), "name its folder with --out"),
        (("digits", "--strategy", "dpp"), r"loop.strategy is one of auto, single, ddp, fsdp.*did you mean ddp\?"),
        (("digits", "--device", "tpu", "--out", "OUT"), "a device is cpu, cuda or auto"),
        (("digits", "--processes", "2", "--strategy", "single", "--out", "OUT"), "several processes need"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, message):
    arguments = [str(tmp_path / "run") if word == "OUT" else word for word in arguments]
    error = invoke(*arguments).exception
    assert isinstance(error, AcutanceError)
    assert re.search(message, str(error))
    assert not (tmp_path / "run").exists()


def test_another_recipe_cannot_take_over_a_run(tmp_path):
    invoke("digits", *TINY, "--out", tmp_path / "run")
    error = invoke("other", "--out", tmp_path / "run", "--resume").exception
    assert "was begun with the recipe digits, not other" in str(error)


def test_a_slice_that_was_trained_on_is_not_called_held_out(tmp_path):
    done = invoke("digits", *TINY, "--set", "task.train_on=all", "--out", tmp_path / "run")
    assert re.search(r"on a slice that was trained on \(task.train_on=all\) after step .* on the test set", done.output)
    assert "held-out" not in done.output


def test_tasks_of_srun_are_sent_to_torchrun(tmp_path, monkeypatch):
    """They would train one run each, in one folder."""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    error = invoke("digits", *TINY, "--out", tmp_path / "run").exception
    assert "srun started 2 tasks" in str(error)
    assert not (tmp_path / "run").exists()


def test_only_we_speak(tmp_path):
    """In a process of its own, where nothing has changed Fabric's loggers yet."""
    command = ["train", "digits", *TINY, "--set", "loop.precision=bf16", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "acutance", *command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ViT of ")
    assert done.stderr == ""
