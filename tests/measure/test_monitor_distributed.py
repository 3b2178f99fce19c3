"""A monitor in two processes: both stay in step, rank 0 writes, training does not notice."""

import contextlib

import pytest
import torch
from monitor_worlds import assert_same, build, data, outcome, probe, seed_everything
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import acutance as ac
from acutance.measure.monitor import History
from together import in_two_processes

STEPS, EVERY = 4, 2


def fit(wrapped, model, rank, monitor=None, before_step=lambda: None):
    """Two batches an optimiser step, each rank its own half."""
    images, labels = (x[8 * rank : 8 * rank + 8] for x in data())
    optimiser = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    seed_everything(rank)
    for _ in range(STEPS):
        optimiser.zero_grad()
        for last in (False, True):
            waits = hasattr(wrapped, "no_sync") and not last
            with wrapped.no_sync() if waits else contextlib.nullcontext():
                F.cross_entropy(wrapped(images + torch.randn(images.shape)), labels).backward()
        before_step()
        optimiser.step()
        if monitor is not None:
            monitor.step()
    return {name: whole(value) for name, value in outcome(model, optimiser).items()}


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded():
    model = build()
    for block in model.vit.blocks:
        fully_shard(block)
    return fully_shard(model)


def worker(rank, folder):
    options = {"every": EVERY, "jsonl": f"{folder}/ddp.jsonl", "tensorboard": f"{folder}/ddp"}

    plain, model = build(), build()
    expected = fit(DistributedDataParallel(plain), plain, rank)
    wrapped = DistributedDataParallel(model)
    monitor = ac.Monitor(wrapped, probe(), **options)
    assert_same(fit(wrapped, model, rank, monitor), expected)
    assert list(monitor.history) == [2, 4]

    model = sharded()
    expected = fit(model, model, rank)
    model = sharded()
    monitor = ac.Monitor(model, probe(), every=EVERY, jsonl=f"{folder}/fsdp.jsonl")
    # Also between backward and step: gathered weights must not outlive the reading.
    assert_same(fit(model, model, rank, monitor, before_step=monitor.record), expected)


@pytest.mark.slow
def test_both_ranks_train_as_without_and_one_writes(tmp_path):
    in_two_processes(worker, tmp_path)
    assert list(History.load(tmp_path / "ddp.jsonl")) == [2, 4]
    assert len((tmp_path / "ddp.jsonl").read_text().splitlines()) == 2
    assert len(list((tmp_path / "ddp").glob("events*"))) == 1
    assert len((tmp_path / "fsdp.jsonl").read_text().splitlines()) == STEPS + STEPS // EVERY
