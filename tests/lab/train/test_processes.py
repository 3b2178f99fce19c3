"""Two processes train as one does, every task, in DDP and FSDP2; a run goes on in another number of processes."""

import gc
import os
import weakref
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from itertools import islice, product

import pytest
import torch
import torch.distributed as dist
from tiny_runs import MODEL, assert_close, assert_same_bits, bits, die_in, fit, in_float64, tiny, use_float64
from torch._dynamo.utils import counters

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.language import LanguageTask
from acutance.lab.train import Config, LoopConfig, OptimConfig
from acutance.lab.train.engine import Engine
from acutance.models import ViT
from tiny_tasks import CUTOFFS, LANGUAGE, SEGMENTER, language, segmentation
from together import in_two_processes

BATCH = 4
LEARNT, CONSTANT = "neutreno:0.6,learn=head", "neutreno:0.6"
vit = partial(tiny, f"task.model.mitigation={LEARNT}", "loop.epochs=1.25")
TASKS = {
    "language": lambda folder: of(language(folder, replace(LANGUAGE, mitigation=LEARNT))),
    "segmenter": lambda folder: of(segmentation(folder, replace(SEGMENTER, mitigation=CONSTANT))),
}


def of(task):
    loop = LoopConfig(epochs=2, batch_size=BATCH, checkpoint_every=100, evaluate_every=2)
    return Config(task=task, optim=OptimConfig(lr=1e-2, clip=1.0), loop=loop)


def with_loop(config, **changes):
    return replace(config, loop=replace(config.loop, **changes))


def like_torchrun(rank):
    """What it says of a process; and float64."""
    use_float64(pytest.MonkeyPatch())
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def train_together(rank, folder):
    like_torchrun(rank)
    ddp, fsdp = vit("loop.strategy=ddp"), vit("loop.strategy=fsdp")
    fit(ddp, folder / "ddp")
    die_in(7, ddp, folder / "ddp cut")
    fit(ddp, folder / "ddp cut", resume=True)
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
        fit(with_loop(TASKS[task](folder), strategy=strategy), folder / f"{task} {strategy}")
    import lightning.fabric  # replaces torch.compile by its own, which must be beneath ours  # noqa: F401

    torch.compile = partial(torch.compile, backend="aot_eager")  # only traces and differentiates: seconds
    # The language model in two graphs, the softmax between them as it is.
    for name, config in {
        "compiled": ddp,
        "language compiled": with_loop(TASKS["language"](folder), strategy="fsdp"),
    }.items():
        torch.compiler.reset()
        _, printed = fit(with_loop(config, compile=True), folder / name)
        assert ("compiled" in printed) == (rank == 0)
        assert counters["frames"]["ok"] > 0  # since reset: something was traced


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Runs by name. One process takes two parts a step; two processes have the same two, one each."""
    folder = tmp_path_factory.mktemp("worlds")
    with in_float64():
        ac.save(ViT(**MODEL.to_dict()), folder / "start.safetensors")
        fit(vit("loop.accumulate=2"), folder / "one")
        die_in(7, vit("loop.accumulate=2"), folder / "one then fsdp")
        for task in TASKS:
            fit(with_loop(TASKS[task](folder), accumulate=2), folder / f"{task} one")
        in_two_processes(train_together, folder)
        fit(vit("loop.accumulate=2"), folder / "fsdp then one", resume=True)
    return {path.name: bits(path) for path in folder.iterdir() if (path / "result.json").exists()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alone", "names"),
    [
        ("one", ("ddp", "fsdp", "compiled", "one then fsdp", "fsdp then one")),
        ("language one", ("language ddp", "language fsdp", "language compiled")),
        ("segmenter one", ("segmenter ddp", "segmenter fsdp")),
    ],
)
def test_two_processes_equal_one_with_the_same_global_batch(worlds, alone, names):
    """Weights, means of gradients and of their squares, after AdamW's steps with dropout, in float64."""
    for name in names:
        assert_close(worlds[name], worlds[alone])
    assert_same_bits(worlds["ddp cut"], worlds["ddp"])


def test_one_process_has_no_word_of_some_clusters_and_no_process_any_of_the_last(tmp_path):
    """What makes the language model's case a test of clusters without words."""
    task = LanguageTask(language(tmp_path), seed=0, device=torch.device("cpu"))

    def clusters(index):
        batches = islice(task.batches(BATCH, 0, BatchSlice(index, 2)), task.steps_per_epoch(BATCH))
        return {bisect_right(CUTOFFS, int(word)) for _, targets in batches for word in targets.unique()}

    assert clusters(0) == {0}
    assert clusters(1) == {0, 1, 2}


def test_a_model_never_drops_its_group_last():
    """It would wait for the group's threads while holding Python's lock, which now and then they wait for too."""
    engine = Engine(LoopConfig(strategy="ddp"), device="cpu", processes=1)
    group, wrapped = weakref.ref(dist.group.WORLD), engine.wrap(torch.nn.Linear(2, 2))
    engine.close()
    del engine, wrapped
    gc.collect()
    assert group() is not None
