"""Training over two machines, each with a torchrun of its own: as one process trains, in a folder that they share."""

import gc
import json
import os
import re
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_train_processes import assert_close, use_float64
from train_worlds import bits, fit

from acutance import recipes
from acutance.train import LoopConfig, override
from acutance.train.engine import Engine

PROGRAM = Path(__file__).with_name("node_commands.py")
PATIENCE = 300  # seconds: a hang fails
CHANGES = [
    "task.fraction=0.1", "task.model.dim=8", "task.model.depth=2", "task.model.heads=2", "task.model.dropout=0.1",
    "optim.lr=1e-2", "schedule.warmup=0.5", "loop.epochs=2", "loop.batch_size=16", "loop.ema=0.9",
    "loop.checkpoint_every=5", "loop.log_every=3", "loop.evaluate_every=1", "loop.monitor_every=5",
]  # fmt: skip
TRAIN = ["train", "digits", "--device", "cpu", *(word for change in CHANGES for word in ("--set", change))]


def on_two_machines(told_of, first, second, dies_in=None):
    """Run one machine's commands beside the other's; gives exit status and output of each torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "TOLD_OF": str(told_of), "OMP_NUM_THREADS": "1"}
    path = [str(PROGRAM.parent), str(PROGRAM.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    agents = []
    for node, commands in enumerate((first, second)):
        where = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *meeting, str(PROGRAM)]
        dying = {"DIES_IN_STEP": str(dies_in)} if node == 1 and dies_in is not None else {}
        agents.append(
            subprocess.Popen(
                [*torchrun, *map(json.dumps, commands)],
                env={**environment, **dying},
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
    """Begun in DDP, resumed in FSDP2; in float64, so that what is left is the order of summation."""
    folder = tmp_path / "run"
    begin, go_on = [*TRAIN, "--out", str(folder)], ["train", "--device", "cpu", "--out", str(folder), "--resume"]
    (status, printed), (dead, _) = on_two_machines(folder, [begin], [begin], dies_in=7)
    assert status != 0
    assert dead == -9
    assert "ddp, 2 × 1 shares of a batch of 16" in printed
    assert (folder / "checkpoints/step-000000005").is_dir()
    assert not (folder / "result.json").exists()

    resumed = on_two_machines(folder, *2 * [[[*go_on, "--strategy", "fsdp"]]])
    (status, printed), (other_status, other_printed) = resumed
    assert (status, other_status) == (0, 0), printed + other_printed
    assert "going on after step 5" in printed
    assert "fsdp, 2 × 1 shares of a batch of 16" in printed
    assert "process 0 wrote" in printed
    assert "process 1 wrote" not in other_printed
    assert [session["processes"] for session in json.loads((folder / "run.json").read_bytes())["sessions"]] == [2, 2]
    assert_close(bits(folder), trained_alone)


@pytest.mark.slow
def test_machines_that_share_no_folder_are_refused_and_none_waits(tmp_path):
    """Resuming, where the second has nothing to resume; and beginning, where it would not find what the first wrote."""
    folders = [tmp_path / "first machine", tmp_path / "second machine"]
    fit(override(recipes.load("digits"), [*CHANGES, "loop.epochs=0.25"]), folders[0] / "begun")
    before = (folders[0] / "begun/run.json").read_bytes()
    commands = [
        [
            ["train", "--out", str(folder / "begun"), "--resume", "--set", "loop.epochs=1"],
            [*TRAIN, "--out", str(folder / "new")],
        ]
        for folder in folders
    ]
    for rank, (_, printed) in enumerate(on_two_machines(folders[1], *commands)):
        assert re.findall(rf"process {rank} ended: (\d)", printed) == ["2", "2"], printed
        assert f"there is no {folders[1]}/begun/run.json" in printed
        assert f"{folders[1]}/new is not the folder that the first process writes to" in printed
        assert "process 1 wrote" not in printed
    assert [path.name for path in folders[0].iterdir()] == ["begun"]  # no trace of what was refused
    assert (folders[0] / "begun/run.json").read_bytes() == before
