"""A recorded step on the CPU, with a GPU that is played."""

from contextlib import contextmanager

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.train.step import WARM_UP, CUDAGraphStep


class Gpu:
    """What it is asked for; a recording replays the function it saw."""

    def __init__(self, monkeypatch):
        self.mode, self.modes, self.recordings, self.replays = 0, [], 0, 0
        self.work = lambda batch: None
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", self.within)
        monkeypatch.setattr(torch.cuda, "graph", self.recording)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)

    def set_mode(self, mode):
        self.mode = mode

    @contextmanager
    def within(self, *args, **options):
        yield

    @contextmanager
    def recording(self, *args, **options):
        self.recordings += 1
        yield

    def replay(self):
        self.replays += 1

    def step(self, batch):
        self.modes.append(self.mode)
        self.work(batch)
        return batch.sum()

    def wait(self, batch=None):
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_waiting_is_refused_in_the_last_call_before_the_recording(gpu):
    recorded = CUDAGraphStep(gpu.step)
    for _ in range(WARM_UP + 3):
        recorded(torch.ones(2))
    assert gpu.modes == [0] * (WARM_UP - 1) + ["error"] + [0]  # the last one is recorded
    assert (gpu.recordings, gpu.replays) == (1, 3)


def test_a_step_that_waits_is_never_recorded(gpu):
    gpu.work, recorded = gpu.wait, CUDAGraphStep(gpu.step)
    for _ in range(WARM_UP - 1):
        recorded(torch.ones(2))
    with pytest.raises(AcutanceError, match=r"synchronizing.*loop\.graph=false trains without$"):
        recorded(torch.ones(2))
    assert (gpu.recordings, gpu.mode) == (0, 0)


def test_a_recording_that_fails_after_all_asks_for_a_new_process(gpu):
    def work(batch):
        if gpu.recordings:
            raise RuntimeError("operation not permitted when stream is capturing")

    gpu.work, recorded = work, CUDAGraphStep(gpu.step)
    for _ in range(WARM_UP):
        recorded(torch.ones(2))
    with pytest.raises(AcutanceError, match=r"not permitted.*in a new process$"):
        recorded(torch.ones(2))


def test_batches_have_one_shape(gpu):
    recorded = CUDAGraphStep(gpu.step)
    recorded(torch.ones(2))
    with pytest.raises(AcutanceError, match=r"\(3,\).*\(2,\)"):
        recorded(torch.ones(3))
