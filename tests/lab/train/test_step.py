"""CUDA graphs and prefetched batches on the CPU, with a GPU that only notes what waits for what."""

from contextlib import contextmanager, nullcontext
from itertools import count, islice

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.train.step import WARM_UP, CUDAGraphStep, _side_stream, prefetch

STEPS = 12


class Stream:
    """Work in its order, and what is done before it in whatever order the streams are served."""

    def __init__(self, device=None):
        self.device, self.done = device, frozenset()

    def record_event(self):
        return self.done

    def wait_event(self, event):
        self.done |= event

    def wait_stream(self, other):
        self.done |= other.done


class Gpu:
    """Two streams, and graphs that are counted."""

    def __init__(self, monkeypatch):
        self.main, self.side = Stream(), Stream("cuda")
        self.current, self.before = self.main, {}
        self.mode, self.modes, self.captures, self.replays = 0, [], 0, 0
        for name, fake in {
            "Stream": lambda device=None: self.side,
            "current_stream": lambda device=None: self.current,
            "stream": self.on,
            "CUDAGraph": lambda: self,
            "graph": lambda *args, **options: nullcontext(setattr(self, "captures", self.captures + 1)),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def replay(self):
        self.replays += 1

    def work(self, *name):
        self.before[name] = self.current.done
        self.current.done |= {name}


@pytest.fixture
def gpu(monkeypatch):
    _side_stream.cache_clear()
    yield Gpu(monkeypatch)
    _side_stream.cache_clear()


def test_a_batch_is_made_beside_the_step_before_it_in_whatever_order_the_streams_are_served(gpu):
    """Not earlier: it may get the memory of the batch before that one."""
    batches = (gpu.work("batch", number) or number for number in count())
    for number in islice(prefetch(batches, torch.device("cuda")), STEPS):
        gpu.work("step", number)
    gpu.work("data freed")
    for number in range(1, STEPS - 1):
        assert ("batch", number) in gpu.before["step", number]
        assert ("batch", number + 1) not in gpu.before["step", number]
        assert ("step", number - 1) in gpu.before["batch", number + 1]
        assert ("step", number) not in gpu.before["batch", number + 1]
    assert ("batch", STEPS) in gpu.before["data freed",]  # which nobody wants, but reads the data


@pytest.mark.parametrize("harm", [None, "waits", "cannot be captured"])
def test_waiting_is_refused_in_the_last_call_before_the_capture(gpu, harm):
    """A step that waits is never captured; after a failed capture the advice is a new process."""
    fails = {None: lambda: False, "waits": lambda: gpu.mode == "error", "cannot be captured": lambda: gpu.captures}

    def plain(batch):
        gpu.modes.append(gpu.mode)
        if fails[harm]():
            raise RuntimeError("not permitted")
        return batch.sum()

    step = CUDAGraphStep(plain)
    for _ in range(WARM_UP + 3 if harm is None else WARM_UP - (harm == "waits")):
        step(torch.ones(2))
    advice = {None: r"\(3,\).*\(2,\)", "waits": r"loop\.graph=false trains without$"}  # batches have one shape
    with pytest.raises(AcutanceError, match=advice.get(harm, "not permitted.*in a new process$")):
        step(torch.ones(2 if harm else 3))
    assert (gpu.captures, gpu.replays, gpu.mode) == (harm != "waits", 0 if harm else 3, 0)
    assert gpu.modes == ([0] * (WARM_UP - 1) + ["error"] + [0])[: len(gpu.modes)]  # the last one is captured
