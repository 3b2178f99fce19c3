"""On a GPU: memory as the allocator sees it, time as the device sees it, and kernels in graphs."""

from itertools import islice

import pytest
import torch

from acutance.lab.bench import floor
from acutance.lab.bench.timing import Settings, peak_mib, seconds_per_step

pytestmark = pytest.mark.cuda


def test_the_peak_is_above_what_is_there_and_time_is_the_devices():
    """A product that takes the device far longer than its launch takes the host."""
    resident = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert peak_mib(lambda: torch.empty_like(resident)[:0], "cuda") == pytest.approx(64, abs=0.1)
    a = torch.randn(8192, 8192, device="cuda")
    seconds_per_step(lambda: a @ a, 2, "cuda")
    assert seconds_per_step(lambda: a @ a, 3, "cuda") > 1e-3


def test_a_graph_does_the_step_so_many_times():
    total = torch.zeros(1, device="cuda")
    replay = floor.graphed(lambda: total.add_(1), 10)
    total.zero_()
    replay()
    replay()
    assert total.item() == 20


def test_every_attention_is_timed_and_none_is_below_its_floor():
    for _, (*_, rows) in islice(floor.tables(Settings("cuda:0", quick=True)), 2):
        assert len(rows) == 4
        assert all(float(row["times_floor"]) > 0.9 for row in rows), rows
