"""2N steps straight are N steps, death, N steps: bit for bit."""

import json
import os
import shutil
import signal
import time
from functools import cache

import pytest
from train_worlds import STEPS_PER_EPOCH, assert_same_bits, bits, die_in, fit, tiny

from acutance.errors import AcutanceError
from acutance.lab.train import StoppedError
from acutance.lab.train.log import Interrupt, read_log
from acutance.lab.train.loop import Loop
from forked import FORKS

KINDS = {
    "everything": (),
    "accumulated": ("loop.accumulate=2",),
    "sgd and poly": ("optim.name=sgd", "schedule.name=poly", "loop.ema=null", "schedule.per=epoch"),
    "augmented": ("task.augment.crop_pad=1", "task.augment.mixup=0.8", "task.augment.erase=0.5", "task.repeats=2"),
    "learnt mitigation": ("task.model.mitigation=neutreno:0.6,learn=head+featscale",),
    "bf16": ("loop.precision=bf16",),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a kind without a break when it is first asked for; nobody writes into its folder."""

    @cache
    def train(kind):
        folder = tmp_path_factory.mktemp("whole") / "run"
        result, _ = fit(tiny(*KINDS[kind]), folder)
        return folder, result

    return train


@pytest.fixture(scope="module")
def whole(trained):
    return trained("everything")[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("died_in", [7, STEPS_PER_EPOCH + 5])  # in the middle of an epoch, two steps after a checkpoint
def test_a_run_that_died_goes_on_to_the_same_bits(kind, died_in, trained, tmp_path):
    config = tiny(*KINDS[kind])
    whole, expected = trained(kind)
    die_in(died_in, config, tmp_path / "cut")
    result, printed = fit(config, tmp_path / "cut", resume=True)
    assert f"going on after step {died_in - died_in % 5}" in printed
    assert_same_bits(bits(tmp_path / "cut"), bits(whole))
    assert result == expected
    logs = [read_log(folder) for folder in (whole, tmp_path / "cut")]
    timeless = [[{k: v for k, v in line.items() if not k.endswith("/s")} for line in log] for log in logs]
    # Log points differ where the run was cut; what both looked at is the same.
    common = {line["step"] for line in timeless[0]} & {line["step"] for line in timeless[1]}
    scores = [{line["step"]: line["val/loss"] for line in log if "val/loss" in line} for log in timeless]
    assert scores[0] == scores[1]
    assert len(common) > 3
    assert [line["step"] for line in timeless[1]] == sorted({line["step"] for line in timeless[1]})


def test_two_commands_do_not_train_one_run_at_once(whole, tmp_path, monkeypatch):
    real, refused = Loop._step, []

    def while_another_comes(self, step, parts):
        if step == 2:
            with pytest.raises(AcutanceError, match=f"is being trained by another command .*process {os.getpid()}"):
                fit(tiny(), tmp_path / "run", resume=True)
            refused.append(step)
        return real(self, step, parts)

    monkeypatch.setattr(Loop, "_step", while_another_comes)
    fit(tiny(), tmp_path / "run")
    assert refused == [2]
    assert_same_bits(bits(tmp_path / "run"), bits(whole))


def test_the_seed_decides(whole, tmp_path):
    fit(tiny("loop.seed=1"), tmp_path / "other")
    with pytest.raises(AssertionError):
        assert_same_bits(bits(whole), bits(tmp_path / "other"))


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_leads_to_the_same_bits(whole, tmp_path):
    die_in(12, tiny(), tmp_path / "cut")
    newest = tmp_path / "cut/checkpoints/step-000000010/optimiser.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    _, printed = fit(tiny(), tmp_path / "cut", resume=True)
    assert "damaged checkpoint" in printed
    assert "optimiser.safetensors has" in printed
    assert "going on after step 5" in printed
    assert_same_bits(bits(tmp_path / "cut"), bits(whole))


def test_with_no_whole_checkpoint_left_it_says_so(tmp_path):
    die_in(6, tiny(), tmp_path / "cut")
    for manifest in tmp_path.glob("cut/checkpoints/*/checkpoint.json"):
        manifest.unlink()
    for _ in range(2):  # they stay where they are, or the second time it would be trained over
        with pytest.raises(AcutanceError, match="none of the checkpoints"):
            fit(tiny(), tmp_path / "cut", resume=True)
    assert len(list(tmp_path.glob("cut/checkpoints/step-*"))) == 2


def test_a_finished_run_has_nothing_left_to_do_and_can_be_made_longer(trained, tmp_path):
    whole, result = trained("everything")
    shutil.copytree(whole, tmp_path / "run")
    before = bits(tmp_path / "run")
    assert fit(tiny(), tmp_path / "run", resume=True)[0] == result
    assert_same_bits(bits(tmp_path / "run"), before)
    longer, _ = fit(tiny("loop.epochs=3"), tmp_path / "run", resume=True)
    assert longer["step"] == 3 * STEPS_PER_EPOCH
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["sessions"][-1]["changed"] == {"loop.epochs": [2.0, 3.0]}
    assert record["config"]["loop"]["epochs"] == 3


def test_a_folder_in_use_is_refused_unless_resumed(tmp_path):
    fit(tiny("loop.epochs=0.2"), tmp_path / "run")
    with pytest.raises(AcutanceError, match="holds a run already: --resume"):
        fit(tiny(), tmp_path / "run")
    with pytest.raises(AcutanceError, match="is no run"):
        fit(tiny(), tmp_path / "elsewhere", resume=True)


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(whole, tmp_path, monkeypatch):
    real = Loop._step

    def interrupted(self, step, parts):
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, step, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", interrupted)
        with pytest.raises(StoppedError, match=r"after step 7 of 16.*acutance train --out .* --resume"):
            fit(tiny(), tmp_path / "cut")
    assert (tmp_path / "cut/checkpoints/step-000000007").is_dir()
    fit(tiny(), tmp_path / "cut", resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(whole))


def test_a_second_ctrl_c_is_obeyed_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def train_tiny(folder):
    fit(tiny(), folder)


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing_that_was_saved(whole, tmp_path):
    """From outside, as soon as a later checkpoint is being written or has been."""
    folder = tmp_path / "cut"
    child = FORKS.Process(target=train_tiny, args=(folder,))
    child.start()
    while child.is_alive() and not list(folder.glob("checkpoints/*step-00000000[1-9]*")):
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode in (-signal.SIGKILL, 0)
    fit(tiny(), folder, resume=True)
    assert_same_bits(bits(folder), bits(whole))
    assert not list(folder.glob("checkpoints/.writing*"))
