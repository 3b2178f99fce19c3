"""On a GPU: the host never waits within a step, and a run resumes."""

import pytest
import torch
from train_worlds import assert_same_bits, bits, tiny

from acutance.errors import AcutanceError
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import train
from acutance.lab.train.diverged import DivergedError
from acutance.lab.train.loop import Loop

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = ("loop.precision=bf16", "loop.deterministic=true", "task.augment.crop_pad=1", "task.augment.mixup=0.8")


@pytest.mark.parametrize("recorded", ["false", "true"])
def test_no_step_waits_for_the_device(tmp_path, monkeypatch, recorded):
    real = Loop._step

    def watched(self, step, parts):
        if step < 5:  # the first steps may load kernels, and one makes the recording
            return real(self, step, parts)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(self, step, parts)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(Loop, "_step", watched)
    train(tiny(*GPU, f"loop.graph={recorded}"), tmp_path / "run", device="cuda")


def cut_and_resume(config, folder, monkeypatch):
    train(config, folder / "whole", device="cuda")
    real = Loop._step

    def dying(self, step, parts):
        if step == 12:
            raise RuntimeError("died")
        return real(self, step, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", dying)
        with pytest.raises(RuntimeError, match="died"):
            train(config, folder / "cut", device="cuda")
    train(config, folder / "cut", device="cuda", resume=True)
    assert_same_bits(bits(folder / "cut"), bits(folder / "whole"))


def test_a_run_that_is_cut_resumes_to_the_same_bits(tmp_path, monkeypatch):
    cut_and_resume(tiny(*GPU), tmp_path, monkeypatch)


def test_compiled(tmp_path):
    result = train(tiny(*GPU, "loop.compile=true"), tmp_path / "run", device="cuda")
    assert result["step"] == 16


RANDOM = ("task.model.drop_path=0.2",)  # beside dropout


def test_a_recorded_step_gives_the_bits_of_one_that_is_not(tmp_path):
    train(tiny(*GPU, *RANDOM), tmp_path / "plain", device="cuda")
    train(tiny(*GPU, *RANDOM, "loop.graph=true"), tmp_path / "recorded", device="cuda")
    assert_same_bits(bits(tmp_path / "recorded"), bits(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
def test_every_optimiser_can_be_recorded(tmp_path, name):
    chosen = (*GPU, f"optim.name={name}")
    train(tiny(*chosen), tmp_path / "plain", device="cuda")
    train(tiny(*chosen, "loop.graph=true"), tmp_path / "recorded", device="cuda")
    assert_same_bits(bits(tmp_path / "recorded"), bits(tmp_path / "plain"))


def test_a_recorded_run_that_is_cut_resumes_to_the_same_bits(tmp_path, monkeypatch):
    cut_and_resume(tiny(*GPU, *RANDOM, "loop.graph=true"), tmp_path, monkeypatch)


def test_a_recorded_and_compiled_run_that_is_cut_resumes_to_the_same_bits(tmp_path, monkeypatch):
    cut_and_resume(tiny(*GPU, *RANDOM, "loop.graph=true", "loop.compile=true"), tmp_path, monkeypatch)


def test_a_step_that_cannot_be_recorded_says_what_to_do_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """Torch 2.11 does not recover from a recording that fails, so none is begun."""
    real, config = ClassificationTask.loss, tiny(*GPU, *RANDOM, "loop.graph=true")

    def waiting(self, model, batch):
        loss = real(self, model, batch)
        float(loss.detach())
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTask, "loss", waiting)
        with pytest.raises(AcutanceError, match=r"cannot be recorded as a CUDA graph.*loop\.graph=false"):
            train(config, tmp_path / "run", device="cuda")
    assert train(config, tmp_path / "again", device="cuda")["step"] == 16


def test_a_recorded_run_that_diverges_says_where(tmp_path):
    config = tiny(*GPU, "loop.graph=true", "optim.lr=1e30", "optim.name=sgd", "loop.epochs=8")
    with pytest.raises(DivergedError, match="first in"):
        train(config, tmp_path / "run", device="cuda")
