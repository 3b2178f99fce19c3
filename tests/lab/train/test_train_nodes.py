"""Training over two machines, each with a torchrun of its own: as one process trains, in a folder that they share."""

import gc
import json
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from node_commands import prepare
from test_train_processes import assert_close, use_float64
from train_worlds import bits, fit

from acutance.lab import recipes
from acutance.lab.train import LoopConfig, override
from acutance.lab.train.engine import Engine
from forked import free_port, run_as_torchrun

PROGRAM = Path(__file__).with_name("node_commands.py")
PATIENCE = 300  # seconds: a hang fails
CHANGES = [
    "task.fraction=0.1", "task.model.dim=8", "task.model.depth=2", "task.model.heads=2", "task.model.dropout=0.1",
    "optim.lr=1e-2", "schedule.warmup=0.5", "loop.epochs=2", "loop.batch_size=16", "loop.ema=0.9",
    "loop.checkpoint_every=5", "loop.log_every=3", "loop.evaluate_every=1", "loop.monitor_every=5",
]  # fmt: skip
TRAIN = ["train", "digits", "--device", "cpu", *(word for change in CHANGES for word in ("--set", change))]


def by_torchruns(told_of, command, second_dies_in):
    """Run a command on both machines by a torchrun each; gives exit status and output of each."""
    port = free_port()
    path = [str(PROGRAM.parent), str(PROGRAM.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    agents = []
    for node, step in enumerate(("none", str(second_dies_in))):
        where = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        words = [*where, *meeting, str(PROGRAM), str(told_of), step, *command]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, words) for agent, words in zip(agents, printed, strict=True)]


def test_a_model_never_lets_go_of_its_group_last():
    """It would wait for the group's threads with Python's lock in hand, which now and then they wait for too."""
    engine = Engine(LoopConfig(strategy="ddp"), device="cpu", processes=1)
    group, wrapped = weakref.ref(dist.group.WORLD), engine.wrap(torch.nn.Linear(2, 2))
    engine.close()
    del engine, wrapped
    gc.collect()
    assert group() is not None


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_float64(patch)
        try:
            fit(override(recipes.load("digits"), [*CHANGES, "loop.accumulate=2"]), folder)
        finally:
            torch.set_default_dtype(torch.float32)
    return bits(folder)


@pytest.mark.slow
def test_two_machines_of_which_one_dies_go_on_and_equal_one_process(trained_alone, tmp_path):
    """Begun in DDP by two torchruns, resumed in FSDP2; in float64, so that what is left is the order of summation."""
    folder = tmp_path / "run"
    (status, printed), (dead, _) = by_torchruns(folder, [*TRAIN, "--out", str(folder)], second_dies_in=7)
    assert status != 0
    assert dead == -9
    assert "ddp, 2 × 1 parts of a batch of 16" in printed
    assert (folder / "checkpoints/step-000000005").is_dir()
    assert not (folder / "result.json").exists()

    go_on = ["train", "--device", "cpu", "--out", folder, "--resume", "--strategy", "fsdp"]
    both = run_as_torchrun(go_on, machines=2, prepare=partial(prepare, folder), seconds=PATIENCE)
    assert [done.returncode for done in both] == [0, 0], both
    first, second = (done.stdout for done in both)
    assert "going on after step 5" in first
    assert "fsdp, 2 × 1 parts of a batch of 16" in first
    assert "process 0 wrote" in first
    assert "process 1 wrote" not in second
    assert [session["processes"] for session in json.loads((folder / "run.json").read_bytes())["sessions"]] == [2, 2]
    assert_close(bits(folder), trained_alone)


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
