"""A model in DDP or FSDP2, read by two processes: the numbers of one, and a training that does not notice."""

import pytest
import torch
import torch.distributed as dist
from monitor_worlds import assert_same, build, probe, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.studies import kernel_assumptions
from acutance.measure.monitor import History
from together import in_two_processes


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
            assert found == {key: pytest.approx(value, rel=1e-6, abs=1e-9) for key, value in expected.items()}
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
    with pytest.raises(AcutanceError, match="DistributedSampler shares samples out already"):
        figures(build(), loader, across_processes=True)


@pytest.mark.slow
def test_two_processes_with_unequal_shares_give_the_numbers_of_one():
    in_two_processes(measuring)


def monitoring(rank, folder):
    plain, model = build(), build()
    expected = train(plain, run=DistributedDataParallel(plain), rank=rank)
    wrapped = DistributedDataParallel(model)
    monitor = ac.Monitor(wrapped, probe(), every=3, jsonl=f"{folder}/ddp.jsonl", tensorboard=f"{folder}/ddp")
    assert_same(train(model, run=wrapped, rank=rank, after_step=lambda _: monitor.step()), expected)
    assert list(monitor.history) == [3, 6]

    expected = train(sharded(build()), rank=rank)
    monitor = ac.Monitor(sharded(build()), probe(), jsonl=f"{folder}/fsdp.jsonl")
    # Also between backward and step: gathered weights must not outlive the reading.
    assert_same(train(monitor.model, rank=rank, amid=monitor.record), expected)


@pytest.mark.slow
def test_both_ranks_train_as_without_and_one_writes(tmp_path):
    in_two_processes(monitoring, tmp_path)
    assert list(History.load(tmp_path / "ddp.jsonl")) == [3, 6]
    assert len(list((tmp_path / "ddp").glob("events*"))) == 1
    for kind, lines in (("ddp", 2), ("fsdp", 6 * 3)):
        assert len((tmp_path / f"{kind}.jsonl").read_text().splitlines()) == lines
