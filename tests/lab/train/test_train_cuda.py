"""On a GPU: the host never waits within a step, a run resumes, graphs and prefetched batches change no bit."""

from itertools import islice

import pytest
import torch
from tiny_runs import assert_same_bits, bits, die_in, fit, tiny

from acutance.errors import AcutanceError
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import DivergedError
from acutance.lab.train.loop import Loop
from acutance.lab.train.step import prefetch

pytestmark = pytest.mark.cuda
AUGMENT = ("task.augment.crop_pad=1", "task.augment.rand_layers=2", "task.augment.erase=0.5", "task.augment.mixup=0.8")
GPU = ("loop.precision=bf16", "loop.deterministic=true", "task.model.drop_path=0.2", *AUGMENT)
GRAPH = "loop.graph=true"


def train(folder, *changes, **options):
    return fit(tiny(*GPU, *changes), folder, device="cuda", **options)[0]


@pytest.mark.parametrize("graph", ["false", "true"])
def test_no_step_waits_for_the_device(tmp_path, monkeypatch, graph):
    real = Loop._step

    def watched(self, step, parts):
        if step < 5:  # the first steps may load kernels, and one is captured
            return real(self, step, parts)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(self, step, parts)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(Loop, "_step", watched)
    train(tmp_path / "run", f"loop.graph={graph}")


@pytest.mark.parametrize("how", [(), (GRAPH,), (GRAPH, "loop.compile=true")])
def test_a_run_that_is_cut_resumes_to_the_same_bits(tmp_path, how):
    train(tmp_path / "whole", *how)
    die_in(12, tiny(*GPU, *how), tmp_path / "cut", device="cuda")
    train(tmp_path / "cut", *how, resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))


def test_a_step_that_cannot_be_captured_says_what_to_do_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """Torch 2.11 does not recover from a capture that fails, so none is begun."""
    real = ClassificationTask.loss

    def waiting(self, model, batch):
        loss = real(self, model, batch)
        float(loss.detach())
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTask, "loss", waiting)
        with pytest.raises(AcutanceError, match=r"cannot be recorded as a CUDA graph.*loop\.graph=false"):
            train(tmp_path / "run", GRAPH)
    assert train(tmp_path / "again", GRAPH)["step"] == 16


def test_a_run_in_graphs_that_diverges_says_where(tmp_path):
    with pytest.raises(DivergedError, match="first in"):
        train(tmp_path / "run", GRAPH, "optim.lr=1e30", "optim.name=sgd", "loop.epochs=8")


@pytest.mark.parametrize("how", ["adamw", "adam task.compile_augment=true", "sgd", "muon", "adamw loop.accumulate=2"])
def test_graphs_and_prefetched_batches_change_no_bit(tmp_path, monkeypatch, how):
    changes = f"optim.name={how}".split()
    train(tmp_path / "graph", *changes, GRAPH)
    train(tmp_path / "prefetched", *changes)
    monkeypatch.setattr(ClassificationTask, "made_on_device", False)
    train(tmp_path / "plain", *changes)
    for kind in ("graph", "prefetched"):
        assert_same_bits(bits(tmp_path / kind), bits(tmp_path / "plain"))


def test_prefetched_batches_are_the_same_while_the_gpu_is_busy():
    """Large ones, beside steps that take longer than a batch, with memory that is used again."""
    task = ClassificationTask(tiny(*AUGMENT).task, seed=0, device=torch.device("cuda"))
    heavy = torch.randn(2048, 2048, device="cuda")

    def sums(batches):
        found = []
        for images, targets in islice(batches, 30):
            torch.linalg.matrix_power(heavy, 3)
            found.append(torch.stack([images.double().sum(), targets.double().square().sum()]))
        return torch.stack(found)

    plain = sums(task.batches(128, 0, BatchSlice()))
    assert torch.equal(sums(prefetch(task.batches(128, 0, BatchSlice()), torch.device("cuda"))), plain)
