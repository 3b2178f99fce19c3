"""CUDA graphs and prefetched batches on the CPU, with a GPU that is played, in whatever order it may work."""

import random
from contextlib import contextmanager, nullcontext
from itertools import count, islice

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.train.step import WARM_UP, CUDAGraphStep, _side_stream, prefetch

STEPS = 12


class Stream:
    """A queue of work and of things to wait for."""

    def __init__(self, device=None):
        self.device, self.queue, self.done = device, [], 0

    def enqueue(self, work):
        self.queue.append((lambda: True, work))

    def record_event(self):
        position = len(self.queue)
        return lambda: self.done >= position

    def wait_event(self, event):
        self.queue.append((event, lambda: None))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def can_go_on(self):
        return self.done < len(self.queue) and self.queue[self.done][0]()

    def go_on(self):
        self.queue[self.done][1]()
        self.done += 1


class Gpu:
    """Two streams, memory that goes back to the stream it came from when a batch is dropped, and graphs."""

    def __init__(self, monkeypatch):
        self.main = self.current = Stream()
        self.side = None
        self.memory, self.free, self.read, self.order = {}, [], [], []
        self.mode, self.modes, self.captures, self.replays = 0, [], 0, 0
        for name, fake in {
            "Stream": self.new_stream,
            "current_stream": lambda device=None: self.current,
            "stream": self.on,
            "CUDAGraph": lambda: self,
            "graph": self.capturing,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        _side_stream.cache_clear()

    def new_stream(self, device=None):
        assert self.side is None
        self.side = Stream(device)
        return self.side

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def capturing(self, *args, **options):
        self.captures += 1
        return nullcontext()

    def replay(self):
        self.replays += 1

    def batches(self):
        for number in count():
            yield Batch(self, number)

    def enqueue_all(self):
        """Everything is asked for before anything is done: the host is as far ahead as it can be."""
        for batch in islice(prefetch(self.batches(), torch.device("cuda")), STEPS):
            self.step(batch.place, batch.number)
            del batch

    def step(self, place, number):
        self.current.enqueue(lambda: (self.order.append(("step", number)), self.read.append(self.memory.get(place))))

    def play(self, choose):
        while ready := [stream for stream in (self.main, self.side) if stream.can_go_on()]:
            choose(ready).go_on()
        assert all(stream.done == len(stream.queue) for stream in (self.main, self.side))


class Batch:
    def __init__(self, gpu, number):
        self.gpu, self.number = gpu, number
        self.place = place = gpu.free.pop() if gpu.free else len(gpu.memory)
        gpu.memory.setdefault(place, None)
        gpu.current.enqueue(lambda: (gpu.order.append(("batch", number)), gpu.memory.update({place: number})))

    def __del__(self):
        self.gpu.free.append(self.place)


@pytest.fixture
def gpu(monkeypatch):
    yield Gpu(monkeypatch)
    _side_stream.cache_clear()


@pytest.mark.parametrize("seed", range(20))
def test_every_step_reads_its_own_batch_in_whatever_order_the_streams_are_served(gpu, seed):
    gpu.enqueue_all()
    gpu.play(random.Random(seed).choice)
    assert gpu.read == list(range(STEPS))
    assert len(gpu.memory) <= 3  # memory of batches that were used is used again, however far the host is


@pytest.mark.parametrize("first", ["main", "side"])
def test_a_batch_is_made_beside_the_step_before_it_and_not_earlier(gpu, first):
    gpu.enqueue_all()
    gpu.play(lambda ready: next((stream for stream in ready if stream is getattr(gpu, first)), ready[0]))
    at = {what: position for position, what in enumerate(gpu.order)}
    for number in range(1, STEPS - 1):
        assert at["batch", number + 1] > at["step", number - 1]
        assert (at["batch", number + 1] < at["step", number]) == (first == "side")


def test_the_data_outlive_the_last_batch_which_nobody_wants(gpu):
    gpu.enqueue_all()
    gpu.main.enqueue(lambda: gpu.order.append("data freed"))
    gpu.play(lambda ready: ready[0])
    assert gpu.order[-1] == "data freed"
    assert ("batch", STEPS) in gpu.order


def graphed(gpu, work=lambda: None):
    def step(batch):
        gpu.modes.append(gpu.mode)
        work()
        return batch.sum()

    return CUDAGraphStep(step)


def test_waiting_is_refused_in_the_last_call_before_the_capture(gpu):
    step = graphed(gpu)
    for _ in range(WARM_UP + 3):
        step(torch.ones(2))
    assert gpu.modes == [0] * (WARM_UP - 1) + ["error"] + [0]  # the last one is captured
    assert (gpu.captures, gpu.replays) == (1, 3)


def test_a_step_that_waits_is_never_captured(gpu):
    def wait():
        if gpu.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    step = graphed(gpu, wait)
    for _ in range(WARM_UP - 1):
        step(torch.ones(2))
    with pytest.raises(AcutanceError, match=r"synchronizing.*loop\.graph=false trains without$"):
        step(torch.ones(2))
    assert (gpu.captures, gpu.mode) == (0, 0)


def test_a_capture_that_fails_after_all_asks_for_a_new_process(gpu):
    def work():
        if gpu.captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    step = graphed(gpu, work)
    for _ in range(WARM_UP):
        step(torch.ones(2))
    with pytest.raises(AcutanceError, match=r"not permitted.*in a new process$"):
        step(torch.ones(2))


def test_batches_have_one_shape(gpu):
    step = graphed(gpu)
    step(torch.ones(2))
    with pytest.raises(AcutanceError, match=r"\(3,\).*\(2,\)"):
        step(torch.ones(3))
