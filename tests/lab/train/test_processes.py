"""Two processes train as one does, in DDP and FSDP2, on one machine or two; a run goes on in another number of them."""

import gc
import json
import os
import signal
import sys
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_runs import MODEL, assert_close, bits, die_in, fit, in_float64, stepping, tiny, use_float64
from torch._C._distributed_c10d import PrefixStore
from torch._dynamo.utils import counters

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.train import Config, LoopConfig, OptimConfig, override
from acutance.lab.train.engine import Engine
from acutance.models import ViT
from forked import run_as_torchrun
from tiny_tasks import LANGUAGE, SEGMENTER, language, segmentation
from together import in_two_processes

LEARNT, CONSTANT = "neutreno:0.6,learn=head", "neutreno:0.6"
vit = partial(tiny, f"task.model.mitigation={LEARNT}", "loop.epochs=1.25")
TASKS = {
    "language": lambda folder: of(language(folder, replace(LANGUAGE, mitigation=LEARNT), val_stride=3)),
    "segmenter": lambda folder: of(segmentation(folder, replace(SEGMENTER, mitigation=CONSTANT))),
}

WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
PATIENCE = 300  # seconds: a hang fails
FATE = ExitStack()
CHANGES = [
    "task.fraction=0.1", "task.model.dim=8", "task.model.depth=2", "task.model.heads=2", "task.model.dropout=0.1",
    "optim.lr=1e-2", "schedule.warmup=0.5", "loop.epochs=1.25", "loop.batch_size=16", "loop.ema=0.9",
    "loop.checkpoint_every=5", "loop.log_every=3", "loop.evaluate_every=1", "loop.monitor_every=5",
]  # fmt: skip
TRAIN = ["train", "digits", "--device", "cpu", *(word for change in CHANGES for word in ("--set", change))]


def of(task):
    loop = LoopConfig(epochs=2, batch_size=4, checkpoint_every=100, evaluate_every=2)
    return Config(task=task, optim=OptimConfig(lr=1e-2, clip=1.0), loop=loop)


def train_together(rank, folder):
    use_float64(pytest.MonkeyPatch())
    # As torchrun would say it.
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ddp, fsdp = vit("loop.strategy=ddp"), vit("loop.strategy=fsdp")
    fit(ddp, folder / "ddp")
    _, printed = fit(fsdp, folder / "fsdp")
    assert ("fsdp, 2 × 1 parts" in printed) == (rank == 0)
    fit(fsdp, folder / "one then fsdp", resume=True)  # begun by one process
    die_in(7, fsdp, folder / "fsdp then one")
    for change, words in (("loop.seed=5", "loop.seed 5 instead of 0"), ("optim.lr=1", "nothing is left to train")):
        with pytest.raises(AcutanceError, match=words):
            fit(vit("loop.strategy=ddp", change), folder / "ddp", resume=True)
    assert (folder / "ddp/result.json").exists()
    if rank == 0:
        (folder / "in the way").touch()  # only the main process meets the error
    with pytest.raises(OSError, match="in the way"):
        fit(ddp, folder / "in the way")
    weights = folder / ("start.safetensors" if rank == 0 else "nowhere")  # only the other meets this one
    with pytest.raises((AcutanceError, OSError), match="nowhere"):
        fit(tiny("loop.strategy=ddp", f"task.weights={weights}"), folder / "without weights")
    with pytest.raises(AcutanceError, match="2 processes × 2 parts"):
        fit(vit("loop.strategy=ddp", "loop.batch_size=18", "loop.accumulate=2"), folder / f"uneven {rank}")
    for task, strategy in product(TASKS, ("ddp", "fsdp")):
        fit(override(TASKS[task](folder), [f"loop.strategy={strategy}"]), folder / f"{task} {strategy}")
    import lightning.fabric  # replaces torch.compile by its own, which must be beneath ours  # noqa: F401

    torch.compile = partial(torch.compile, backend="aot_eager")  # only traces and differentiates: seconds
    # The language model in two graphs, the softmax between them as it is.
    sharded = override(TASKS["language"](folder), ["loop.strategy=fsdp"])
    for name, config in {"compiled": ddp, "language compiled": sharded}.items():
        torch.compiler.reset()
        _, printed = fit(override(config, ["loop.compile=true"]), folder / name)
        assert ("compiled" in printed) == (rank == 0)
        assert counters["frames"]["ok"] > 0  # since reset: something was traced


@pytest.mark.slow
def test_two_processes_equal_one_with_the_same_global_batch(tmp_path):
    """Weights, means of gradients and of their squares, after AdamW's steps with dropout, in float64.

    One process takes two parts a step; two processes have the same two, one each.
    """
    with in_float64():
        ac.save(ViT(**MODEL.to_dict()), tmp_path / "start.safetensors")
        fit(vit("loop.accumulate=2"), tmp_path / "one")
        die_in(7, vit("loop.accumulate=2"), tmp_path / "one then fsdp")
        for task in TASKS:
            fit(override(TASKS[task](tmp_path), ["loop.accumulate=2"]), tmp_path / f"{task} one")
        in_two_processes(train_together, tmp_path)
        fit(vit("loop.accumulate=2"), tmp_path / "fsdp then one", resume=True)
    for alone, names in {
        "one": ("ddp", "fsdp", "compiled", "one then fsdp", "fsdp then one"),
        "language one": ("language ddp", "language fsdp", "language compiled"),
        "segmenter one": ("segmenter ddp", "segmenter fsdp"),
    }.items():
        for name in names:
            assert_close(bits(tmp_path / name), bits(tmp_path / alone))


def test_a_model_never_drops_its_group_last():
    """It would wait for the group's threads while holding Python's lock, which now and then they wait for too."""
    engine = Engine(LoopConfig(strategy="ddp"), device="cpu", processes=1)
    group, wrapped = weakref.ref(dist.group.WORLD), engine.wrap(torch.nn.Linear(2, 2))
    engine.close()
    del engine, wrapped
    gc.collect()
    assert group() is not None


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
