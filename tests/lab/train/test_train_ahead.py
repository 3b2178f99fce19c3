"""Batches made ahead: on the CPU with streams that are played, in whatever order a GPU may take them."""

import random
from contextlib import contextmanager
from itertools import count, islice

import pytest
import torch
from train_worlds import assert_same_bits, bits, tiny

from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import train
from acutance.lab.train.step import _side_stream, prefetch

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
    """Two streams, and memory that goes back, when a batch is dropped, to the stream it came from."""

    def __init__(self, monkeypatch):
        self.main = self.current = Stream()
        self.side = None
        self.memory, self.free = {}, []
        self.read, self.order = [], []
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        _side_stream.cache_clear()

    def new_stream(self, device):
        assert self.side is None
        self.side = Stream(device)
        return self.side

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def batches(self):
        for number in count():
            yield Batch(self, number)

    def step(self, batch):
        place, number = batch.place, batch.number
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


def enqueue_all(gpu):
    """Everything is asked for before anything is done: the host is as far ahead as it can be."""
    for batch in islice(prefetch(gpu.batches(), torch.device("cuda")), STEPS):
        gpu.step(batch)


@pytest.mark.parametrize("seed", range(20))
def test_every_step_reads_its_own_batch_in_whatever_order_the_streams_are_served(gpu, seed):
    enqueue_all(gpu)
    gpu.play(random.Random(seed).choice)
    assert gpu.read == list(range(STEPS))
    assert len(gpu.memory) <= 3  # memory of batches that were used is used again, however far the host is


@pytest.mark.parametrize("first", ["main", "side"])
def test_a_batch_is_made_beside_the_step_before_it_and_not_earlier(gpu, first):
    enqueue_all(gpu)
    gpu.play(lambda ready: next((stream for stream in ready if stream is getattr(gpu, first)), ready[0]))
    at = {what: position for position, what in enumerate(gpu.order)}
    for number in range(1, STEPS - 1):
        assert at["batch", number + 1] > at["step", number - 1]
        assert (at["batch", number + 1] < at["step", number]) == (first == "side")


def test_the_data_outlive_the_last_batch_which_nobody_wants(gpu):
    enqueue_all(gpu)
    gpu.main.enqueue(lambda: gpu.order.append("data freed"))
    gpu.play(lambda ready: ready[0])
    assert gpu.order[-1] == "data freed"
    assert ("batch", STEPS) in gpu.order


GPU = ("loop.precision=bf16", "loop.deterministic=true", "task.model.drop_path=0.2")
AUGMENT = ("task.augment.crop_pad=1", "task.augment.rand_layers=2", "task.augment.erase=0.5", "task.augment.mixup=0.8")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "how", [(), ("loop.graph=true",), ("loop.graph=true", "task.compile_augment=true"), ("loop.accumulate=2",)]
)
def test_training_has_the_bits_of_training_with_batches_made_between_steps(tmp_path, monkeypatch, how):
    config = tiny(*GPU, *AUGMENT, *how)
    train(config, tmp_path / "ahead", device="cuda")
    monkeypatch.setattr(ClassificationTask, "made_on_device", False)
    train(config, tmp_path / "between", device="cuda")
    assert_same_bits(bits(tmp_path / "ahead"), bits(tmp_path / "between"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_made_ahead_are_the_same_while_the_gpu_is_busy():
    """Large ones, beside steps that take longer than a batch, with memory that is used again."""
    config = tiny(*AUGMENT).task
    task = ClassificationTask(config, seed=0, device=torch.device("cuda"))
    heavy = torch.randn(2048, 2048, device="cuda")

    def sums(batches):
        found = []
        for images, targets in islice(batches, 30):
            torch.linalg.matrix_power(heavy, 3)
            found.append(torch.stack([images.double().sum(), targets.double().square().sum()]))
        return torch.stack(found)

    plain = sums(task.batches(128, 0, BatchSlice()))
    assert torch.equal(sums(prefetch(task.batches(128, 0, BatchSlice()), torch.device("cuda"))), plain)
