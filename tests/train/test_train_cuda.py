"""On a GPU: the host never waits within a step, and a run resumes."""

import pytest
import torch
from train_worlds import assert_same_bits, bits, tiny

from acutance.train import train
from acutance.train.loop import Loop

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = ("loop.precision=bf16", "loop.deterministic=true", "task.augment.crop_pad=1", "task.augment.mixup=0.8")


def test_no_step_waits_for_the_device(tmp_path, monkeypatch):
    real = Loop._step

    def watched(self, step, parts):
        if step < 2:  # the first steps may load kernels
            return real(self, step, parts)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(self, step, parts)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(Loop, "_step", watched)
    train(tiny(*GPU), tmp_path / "run", device="cuda")


def test_a_run_that_is_cut_resumes_to_the_same_bits(tmp_path, monkeypatch):
    config = tiny(*GPU)
    train(config, tmp_path / "whole", device="cuda")
    real = Loop._step

    def dying(self, step, parts):
        if step == 12:
            raise RuntimeError("died")
        return real(self, step, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", dying)
        with pytest.raises(RuntimeError, match="died"):
            train(config, tmp_path / "cut", device="cuda")
    train(config, tmp_path / "cut", device="cuda", resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))


def test_compiled(tmp_path):
    result = train(tiny(*GPU, "loop.compile=true"), tmp_path / "run", device="cuda")
    assert result["step"] == 16
