"""Several processes share one measurement: how it is shared out, and put together again."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import acutance as ac
from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.measure.reader import MetricReader

FAR = np.random.default_rng(0).normal(1000.0, 0.1, 9)  # a mean far above the spread shows a careless formula


@pytest.mark.parametrize(
    ("parts", "mean", "std"),
    [(np.split(FAR, [1, 2, 6]), FAR.mean(), FAR.std(ddof=1))]
    + [(parts, math.inf, math.inf) for parts in itertools.permutations([[1.0, 2.0], [math.inf], [3.0]])],
)
def test_merged_statistics_are_those_of_the_whole_and_keep_infinities(parts, mean, std) -> None:
    reader = MetricReader(["token_cosine"], ["block"])
    for part in parts:
        reader.take_in((("block", 1, "token_cosine"),), np.array([part]))
    reader.take_in((("block", 0, "token_cosine"), ("block", 2, "token_cosine")), np.zeros((2, 1)))  # not in all batches
    found = reader.readings()[1]
    assert found.mean == pytest.approx(mean, rel=1e-15)
    assert found.std == pytest.approx(std, rel=1e-9)
    assert [r.count for r in reader.readings()] == [1, sum(map(len, parts)), 1]


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_shares_are_disjoint_and_complete(kind, size: int) -> None:
    shares = [list(processes.share(kind(range(7)), rank, size)) for rank in range(size)]
    assert sorted(itertools.chain(*shares)) == list(range(7))
    assert shares[0] == list(range(0, 7, size))


def test_batches_of_other_processes_are_never_made() -> None:
    class Precious(list):
        asked: list[int] = []  # noqa: RUF012

        def __getitem__(self, index):
            self.asked.append(index)
            return super().__getitem__(index)

    batches = Precious(range(7))
    share = processes.share(batches, 1, 3)
    assert (len(share), list(share), batches.asked) == (2, [1, 4], [1, 4])


class Endless(IterableDataset):
    """Samples of which nobody knows the number, such as a stream's."""

    def __iter__(self):
        return iter(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("options", [{"progress": True}, {"progress": False, "across_processes": True}], ids=str)
def test_a_loader_without_a_length_is_measured(options) -> None:
    torch.manual_seed(0)
    model = ac.models.ViT(image_size=8, patch_size=4, dim=8, depth=1, heads=2, num_classes=3)
    expected = ac.measure(model, [torch.stack(list(Endless()))], metrics="token_cosine", progress=False)
    found = ac.measure(model, DataLoader(Endless(), batch_size=2), metrics="token_cosine", **options)
    assert [r.count for r in found.readings] == [4, 4]
    assert [r.mean for r in found.readings] == pytest.approx([r.mean for r in expected.readings], rel=1e-6)


def test_a_process_that_ran_out_runs_along(monkeypatch) -> None:
    """The other process, played here, has two batches; this one has one, then none."""
    turns = iter([[True, True], [False, True], [None, "theirs"], [False, False]])
    monkeypatch.setattr(processes, "gather", lambda own: next(turns))
    assert list(processes.pad_uneven_batches(["mine"], wait=True)) == [("mine", True), ("theirs", False)]
    assert list(processes.pad_uneven_batches(iter("ab"), wait=False)) == [("a", True), ("b", True)]


def test_one_process_needs_no_others_and_a_device_is_chosen_or_refused() -> None:
    assert processes.rank_and_world_size() == (0, 1)
    assert processes.gather("mine") == ["mine"]
    with processes.joined() as place:
        assert place == (0, 1)
    assert processes.device("cpu") == "cpu"
    with pytest.raises(AcutanceError, match="cpu, cuda or auto, not 'tpu'"):
        processes.device("tpu")
    if not torch.cuda.is_available():
        assert processes.device("auto") == "cpu"
        with pytest.raises(AcutanceError, match="no CUDA device"):
            processes.device("cuda")


@pytest.mark.parametrize(("torchrun", "argument", "code"), [("", "lost", 2), ("1", "lost", 2), ("1", "--version", 0)])
def test_a_process_of_torchrun_leaves_at_once_with_everything_written(torchrun, argument, code):
    program = "import atexit, runpy; atexit.register(print, 'taken down')"
    command = [sys.executable, "-c", f"{program}; runpy.run_module('acutance', run_name='__main__')", argument]
    environment = os.environ | ({"TORCHELASTIC_RUN_ID": torchrun} if torchrun else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("taken down" in done.stdout) == (not torchrun)
    assert {"lost": "No such command", "--version": "acutance 0"}[argument] in done.stdout + done.stderr
