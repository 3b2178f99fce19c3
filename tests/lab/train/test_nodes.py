"""Training over two machines: as one process trains, in a folder that they share."""

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import assert_close, bits, fit, in_float64, stepping, use_float64
from torch._C._distributed_c10d import PrefixStore

from acutance.lab import recipes
from acutance.lab.train import override
from forked import run_as_torchrun

WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
PATIENCE = 300  # seconds: a hang fails
FATE = ExitStack()
CHANGES = [
    "task.fraction=0.1", "task.model.dim=8", "task.model.depth=2", "task.model.heads=2", "task.model.dropout=0.1",
    "optim.lr=1e-2", "schedule.warmup=0.5", "loop.epochs=1.25", "loop.batch_size=16", "loop.ema=0.9",
    "loop.checkpoint_every=5", "loop.log_every=3", "loop.evaluate_every=1", "loop.monitor_every=5",
]  # fmt: skip
TRAIN = ["train", "digits", "--device", "cpu", *(word for change in CHANGES for word in ("--set", change))]


def prepare(folder, dying=None):
    """Before a command, in a process of its own: float64, and every change in the folder is printed.

    The `dying` process loses its machine in step 7.
    """
    torch.set_num_threads(1)
    use_float64(pytest.MonkeyPatch())
    wait = PrefixStore.wait

    def hook(event, arguments):
        writes = event in WRITES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes and str(arguments[0]).startswith(str(folder)):
            print(f"process {os.environ['RANK']} wrote: {event} {Path(arguments[0]).name}", flush=True)

    def late(store, keys, *timeout):
        """The second process then meets the first at its old store, which must not be closed."""
        wait(store, keys, *timeout)
        time.sleep(keys == ["all have read"])

    sys.addaudithook(hook)
    PrefixStore.wait = late
    if os.environ["RANK"] == dying:
        FATE.enter_context(stepping(7, lambda: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.slow
def test_two_machines_of_which_one_dies_go_on_and_equal_one_process(tmp_path):
    """Begun in DDP, resumed in FSDP2; in float64, so that what is left is the order of summation."""
    folder = tmp_path / "run"
    begin = partial(run_as_torchrun, machines=2, seconds=PATIENCE)
    alive, dead = begin([*TRAIN, "--out", folder], prepare=partial(prepare, folder, dying="1"))
    assert (alive.returncode in (0, -9), dead.returncode) == (False, -9), alive
    assert "ddp, 2 × 1 parts of a batch of 16" in alive.stdout
    assert (folder / "checkpoints/step-000000005").is_dir()
    assert not (folder / "result.json").exists()

    go_on = ["train", "--device", "cpu", "--out", folder, "--resume", "--strategy", "fsdp"]
    both = begin(go_on, prepare=partial(prepare, folder))
    assert [done.returncode for done in both] == [0, 0], both
    first, second = (done.stdout for done in both)
    assert "going on after step 5" in first
    assert "fsdp, 2 × 1 parts of a batch of 16" in first
    assert "process 0 wrote" in first
    assert "process 1 wrote" not in second
    assert [session["processes"] for session in json.loads((folder / "run.json").read_bytes())["sessions"]] == [2, 2]
    with in_float64():
        fit(override(recipes.load("digits"), [*CHANGES, "loop.accumulate=2"]), tmp_path / "alone")
    assert_close(bits(folder), bits(tmp_path / "alone"))


@pytest.mark.slow
def test_machines_that_share_no_folder_are_refused_and_none_waits(tmp_path):
    """Resuming, where the second has nothing to resume; and beginning, where it would not find what the first wrote."""
    folders = [tmp_path / "first machine", tmp_path / "second machine"]
    fit(override(recipes.load("digits"), [*CHANGES, "loop.epochs=0.25"]), folders[0] / "begun")
    before = (folders[0] / "begun/run.json").read_bytes()
    resume = [["train", "--out", folder / "begun", "--resume", "--set", "loop.epochs=1"] for folder in folders]
    begin = [[*TRAIN, "--out", folder / "new"] for folder in folders]
    refused = f"there is no {folders[1]}/begun/run.json"
    elsewhere = f"{folders[1]}/new is not the folder that the first process writes to"
    for commands, words in ((resume, refused), (begin, elsewhere)):
        both = run_as_torchrun(*commands, machines=2, prepare=partial(prepare, folders[1]), seconds=PATIENCE)
        assert [done.returncode for done in both] == [2, 2], both
        for done in both:
            assert words in done.stdout + done.stderr
            assert "process 1 wrote" not in done.stdout
    assert [path.name for path in folders[0].iterdir()] == ["begun"]  # no trace of what was refused
    assert (folders[0] / "begun/run.json").read_bytes() == before
