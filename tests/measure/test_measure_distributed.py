"""A model in DDP or FSDP2 is measured by two processes: the numbers of one, however the batches fall."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.studies import kernel_assumptions
from acutance.models import ViT
from together import in_two_processes

METRICS = ["token_cosine", "attention_entropy"]


def build():
    torch.manual_seed(0)
    model = ViT(image_size=8, patch_size=4, dim=12, depth=2, heads=3, num_classes=5).double()
    model.register_buffer("steps", torch.zeros(1))  # DDP sends buffers around in every forward pass
    return model


def sharded():
    model = build()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=generator) for _ in range(count)]


def figures(model, batches, **options):
    profile = ac.measure(model, batches, metrics=METRICS, tap=["block", "attention"], progress=False, **options)
    return [(r.tap, r.layer, r.metric, r.count, r.mean, r.std) for r in profile.readings]


def assert_equal(found, expected):
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    torch.testing.assert_close(
        torch.tensor([row[4:] for row in found]), torch.tensor([row[4:] for row in expected]), rtol=1e-6, atol=1e-9
    )


def worker(rank):
    for wrap in (lambda: DistributedDataParallel(build()), sharded):
        for count, kind in ((1, list), (3, iter)):  # of one batch, the second process has nothing of its own
            found = figures(wrap(), kind(images(count)), across_processes=True)
            assert_equal(found, figures(build(), images(count)))
    model = sharded()
    figures(model, images(2), across_processes=True)
    assert all(isinstance(p, dist.tensor.DTensor) for p in model.parameters()), "gathered weights would go stale"
    longer = figures(sharded(), iter(images((5, 1)[rank])), across_processes=True)  # one sits out three times
    assert {count for *_, count, _, _ in longer} == {9}
    with pytest.raises(AcutanceError, match="the processes were given 3, 2 batches"):
        figures(sharded(), images(3 - rank), across_processes=True)
    for read in (ac.explain, kernel_assumptions):
        with pytest.raises(AcutanceError, match="reads the weights, of which FSDP leaves each process a part"):
            read(sharded(), images(1))
        read(DistributedDataParallel(build()), images(1))
    samples = images(2)[0]
    loader = DataLoader(samples, sampler=DistributedSampler(samples))
    with pytest.raises(AcutanceError, match="DistributedSampler has done so already"):
        figures(build(), loader, across_processes=True)


@pytest.mark.slow
def test_two_processes_with_unequal_shares_give_the_numbers_of_one(tmp_path):
    in_two_processes(worker)
