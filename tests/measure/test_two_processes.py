"""A model in DDP or FSDP2, read by two processes: the numbers of one, and a training that does not notice."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from monitor_worlds import assert_same, build, data, draws, outcome, probe
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.studies import kernel_assumptions
from acutance.measure.monitor import History
from together import in_two_processes

STEPS, EVERY = 4, 2


def sharded(model):
    for block in model.vit.blocks:
        fully_shard(block)
    return fully_shard(model)


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=generator) for _ in range(count)]


def figures(model, batches, **options):
    options |= {"metrics": ["token_cosine", "attention_entropy"], "tap": ["block", "attention"], "progress": False}
    return {
        (r.tap, r.layer, r.metric, r.count): (r.mean, r.std) for r in ac.measure(model, batches, **options).readings
    }


def measuring(rank):
    for wrap in (DistributedDataParallel, sharded):
        for count, kind in ((1, list), (3, iter)):  # of one batch, the second process has nothing of its own
            found = figures(wrap(build().double()), kind(images(count)), across_processes=True)
            expected = figures(build().double(), images(count))
            assert found.keys() == expected.keys()
            assert all(found[key] == pytest.approx(value, rel=1e-6, abs=1e-9) for key, value in expected.items())
    model = sharded(build().double())
    longer = figures(model, iter(images((5, 1)[rank])), across_processes=True)  # one sits out three times
    assert {count for *_, count in longer} == {9}
    assert all(isinstance(p, dist.tensor.DTensor) for p in model.parameters()), "gathered weights would go stale"
    with pytest.raises(AcutanceError, match="the processes were given 3, 2 batches"):
        figures(model, images(3 - rank), across_processes=True)
    for read in (ac.explain, kernel_assumptions):
        with pytest.raises(AcutanceError, match="reads the weights, of which FSDP leaves each process a part"):
            read(model, images(1))
        read(DistributedDataParallel(build().double()), images(1))
    samples = images(2)[0]
    loader = DataLoader(samples, sampler=DistributedSampler(samples))
    with pytest.raises(AcutanceError, match="DistributedSampler has done so already"):
        figures(build(), loader, across_processes=True)


@pytest.mark.slow
def test_two_processes_with_unequal_shares_give_the_numbers_of_one():
    in_two_processes(measuring)


def fit(wrapped, model, rank, monitor=None, before_step=lambda: None):
    """Two batches an optimiser step, each rank its own half."""
    pictures, labels = (x[8 * rank : 8 * rank + 8] for x in data())
    optimiser = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    draws(seed=rank)
    for _ in range(STEPS):
        optimiser.zero_grad()
        for last in (False, True):
            waits = hasattr(wrapped, "no_sync") and not last
            with wrapped.no_sync() if waits else contextlib.nullcontext():
                F.cross_entropy(wrapped(pictures + torch.randn(pictures.shape)), labels).backward()
        before_step()
        optimiser.step()
        if monitor is not None:
            monitor.step()
    left = outcome(model, optimiser)
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in left.items()}


def monitoring(rank, folder):
    plain, model = build(), build()
    expected = fit(DistributedDataParallel(plain), plain, rank)
    wrapped = DistributedDataParallel(model)
    monitor = ac.Monitor(wrapped, probe(), every=EVERY, jsonl=f"{folder}/ddp.jsonl", tensorboard=f"{folder}/ddp")
    assert_same(fit(wrapped, model, rank, monitor), expected)
    assert list(monitor.history) == [2, 4]

    plain, model = sharded(build()), sharded(build())
    expected = fit(plain, plain, rank)
    monitor = ac.Monitor(model, probe(), every=EVERY, jsonl=f"{folder}/fsdp.jsonl")
    # Also between backward and step: gathered weights must not outlive the reading.
    assert_same(fit(model, model, rank, monitor, before_step=monitor.record), expected)


@pytest.mark.slow
def test_both_ranks_train_as_without_and_one_writes(tmp_path):
    in_two_processes(monitoring, tmp_path)
    assert list(History.load(tmp_path / "ddp.jsonl")) == [2, 4]
    assert len(list((tmp_path / "ddp").glob("events*"))) == 1
    for kind, lines in (("ddp", 2), ("fsdp", STEPS + STEPS // EVERY)):
        assert len((tmp_path / f"{kind}.jsonl").read_text().splitlines()) == lines
