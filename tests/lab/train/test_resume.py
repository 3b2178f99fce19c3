"""2N steps straight are N steps, death, N steps: bit for bit. What would make another run is refused."""

import json
import os
import re
import shutil
import signal
import time
from functools import cache

import pytest
from tiny_runs import STEPS_PER_EPOCH, assert_same_bits, bits, die_in, fit, stepping, tiny

from acutance.errors import AcutanceError
from acutance.lab.train import StoppedError, override
from acutance.lab.train.log import interruptible, read_log
from acutance.lab.train.run import changes
from forked import FORKS

KINDS = {
    "adamw": (),
    "sgd": (
        "optim.name=sgd", "schedule.name=poly", "schedule.per=epoch", "loop.ema=null", "loop.precision=bf16",
        "task.model.mitigation=neutreno:0.6,learn=head+featscale",
    ),
    "muon": (
        "optim.name=muon", "loop.accumulate=2", "task.augment.crop_pad=1", "task.augment.mixup=0.8",
        "task.augment.erase=0.5", "task.repeats=2",
    ),
}  # fmt: skip


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
    return trained("adamw")[0]


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_died_goes_on_to_the_same_bits(kind, trained, tmp_path):
    """In the middle of an epoch, three steps after a checkpoint."""
    config = tiny(*KINDS[kind])
    whole, expected = trained(kind)
    die_in(STEPS_PER_EPOCH + 5, config, tmp_path / "cut")
    result, printed = fit(config, tmp_path / "cut", resume=True)
    assert "going on after step 10" in printed
    assert_same_bits(bits(tmp_path / "cut"), bits(whole))
    assert result == expected
    logs = [read_log(folder) for folder in (whole, tmp_path / "cut")]
    scores = [{line["step"]: line["val/loss"] for line in log if "val/loss" in line} for log in logs]
    assert scores[0] == scores[1]
    steps = [[line["step"] for line in log] for log in logs]  # log points differ where the run was cut
    assert steps[1] == sorted(set(steps[1]))
    assert len({*steps[0]} & {*steps[1]}) > 3


def test_two_commands_do_not_train_one_run_at_once(whole, tmp_path):
    def another():
        with pytest.raises(AcutanceError, match=f"is being trained by another command .*process {os.getpid()}"):
            fit(tiny(), tmp_path / "run", resume=True)

    with stepping(2, another):
        fit(tiny(), tmp_path / "run")
    assert_same_bits(bits(tmp_path / "run"), bits(whole))


def test_damaged_checkpoints_are_put_aside_and_with_none_at_all_it_starts_over(whole, tmp_path):
    die_in(12, tiny(), tmp_path / "cut")
    newest = tmp_path / "cut/checkpoints/step-000000010/optimiser.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    shutil.copytree(tmp_path / "cut", tmp_path / "damaged")
    _, printed = fit(tiny(), tmp_path / "damaged", resume=True)
    assert re.search("damaged checkpoint .*optimiser.safetensors has .*\ngoing on after step 5", printed)
    assert_same_bits(bits(tmp_path / "damaged"), bits(whole))
    for manifest in tmp_path.glob("cut/checkpoints/*/checkpoint.json"):
        manifest.unlink()
    for _ in range(2):  # they stay where they are, or the second time it would be trained over
        with pytest.raises(AcutanceError, match="none of the checkpoints"):
            fit(tiny(), tmp_path / "cut", resume=True)
    assert len(list(tmp_path.glob("cut/checkpoints/step-*"))) == 2
    shutil.rmtree(tmp_path / "cut/checkpoints")
    _, printed = fit(tiny(), tmp_path / "cut", resume=True)
    assert "checkpoints holds no checkpoint: starting over from step 0" in printed
    assert_same_bits(bits(tmp_path / "cut"), bits(whole))


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(whole, tmp_path):
    with (
        stepping(6, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(StoppedError, match=r"after step 7 of 16.*acutance train --out .* --resume"),
    ):
        fit(tiny(), tmp_path / "cut")
    assert (tmp_path / "cut/checkpoints/step-000000007").is_dir()
    fit(tiny(), tmp_path / "cut", resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(whole))


def test_a_second_ctrl_c_is_obeyed_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def train_tiny(folder, resume):
    fit(tiny(), folder, resume=resume)


def test_kill_9_at_any_moment_loses_nothing_that_was_saved(whole, tmp_path):
    """From outside and again and again, as soon as a file is being written or has been."""
    folder = tmp_path / "cut"
    for moment in ("checkpoints/.writing-step-000000005", "best.safetensors", "checkpoints/step-000000015"):
        child = FORKS.Process(target=train_tiny, args=(folder, (folder / "run.json").exists()))
        child.start()
        while child.is_alive() and not (folder / moment).exists():
            time.sleep(0.0005)
        child.kill()
        child.join()
        assert child.exitcode in (-signal.SIGKILL, 0)
    fit(tiny(), folder, resume=True)
    assert_same_bits(bits(folder), bits(whole))
    assert not list(folder.glob("checkpoints/.writing*"))


def on_disk(folder):
    """All of it, but who held the lock last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def assert_refused(run, message, *changes):
    before = on_disk(run)
    with pytest.raises(AcutanceError, match=message) as caught:
        fit(tiny(*changes), run, resume=True)
    assert "\n" not in str(caught.value)
    assert on_disk(run) == before


def test_what_would_make_another_run_is_refused(run, tmp_path):
    for change, old in {
        "task.model.mitigation=neutreno:0.6": "none",
        "task.fraction=0.2": 0.1,
        "task.weights=other.safetensors": "none",
        "loop.precision=bf16": "fp32",
        "loop.ema=none": 0.9,
    }.items():
        words = re.escape(f"{change.replace('=', ' ')} instead of {old}")
        assert_refused(run, f"run cannot go on with {words}, which would make it another", change)
        assert_refused(run, words, change, "loop.epochs=3")  # with steps left, too
    several = ("loop.seed=5", "loop.batch_size=32", "loop.log_every=4")
    assert_refused(run, r"with loop\.batch_size 32 instead of 16, loop\.seed 5 instead of 0, which", *several)
    assert_refused(run, "trained by adamw, whose moments muon cannot go on from", "optim.name=muon")
    for change in ("optim.lr=1", "schedule.final=1e-3", "loop.log_every=7", "loop.epochs=2.001"):
        assert_refused(run, rf"at step 16 of 16, so {re.escape(change.partition('=')[0])} ", change)
    with pytest.raises(AcutanceError, match="holds a run already: --resume"):
        fit(tiny(), run)
    assert_refused(tmp_path / "elsewhere", "is no run")
    record = json.loads((run / "run.json").read_text())
    record["config"]["task"]["model"]["depth"] = 3  # changed by hand
    (run / "run.json").write_text(json.dumps(record))
    assert_refused(run, "the checkpoint is of another model", "task.model.depth=3", "loop.epochs=3")


def test_how_and_how_fast_may_change_while_steps_are_left(tmp_path):
    die_in(7, tiny(), tmp_path / "run")
    changed = tiny(
        "loop.epochs=3", "optim.lr=1e-3", "optim.betas=[0.8,0.9]", "schedule.name=constant", "loop.log_every=4",
        "loop.evaluate_every=0.5", "loop.checkpoint_every=6", "loop.keep_last=1", "loop.monitor_every=8",
        "loop.accumulate=2", "loop.strategy=single", "loop.deterministic=true", "task.data_dir=elsewhere",
    )  # fmt: skip
    result, _ = fit(changed, tmp_path / "run", resume=True)
    assert result["step"] == 3 * STEPS_PER_EPOCH
    assert {line["lr"] for line in read_log(tmp_path / "run") if line["step"] > 8} == {1e-3}
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["sessions"][-1]["changed"] == changes(tiny().to_dict(), changed.to_dict())
    assert record["config"] == changed.to_dict()


def test_a_finished_run_has_nothing_left_to_do_and_can_be_made_longer(run, trained):
    before = on_disk(run)
    assert fit(tiny(), run, resume=True)[0] == trained("adamw")[1]
    assert on_disk(run) == before
    assert fit(tiny("loop.epochs=3"), run, resume=True)[0]["step"] == 3 * STEPS_PER_EPOCH
    assert json.loads((run / "run.json").read_text())["sessions"][-1]["changed"] == {"loop.epochs": [2.0, 3.0]}
    shutil.rmtree(run / "checkpoints")
    message = "run is finished, and .*checkpoints holds no checkpoint to go on from"
    assert_refused(run, message, "loop.epochs=4")
    assert fit(tiny("loop.epochs=3"), run, resume=True)[0]["step"] == 3 * STEPS_PER_EPOCH  # nothing was wanted
    (run / "result.json").unlink()  # as of one that was being made longer
    assert_refused(run, message, "loop.epochs=3")


def test_a_run_whose_result_alone_is_missing_is_ended_wherever_its_data_lie(run, whole):
    for name in ("result.json", "model.safetensors"):  # cut after the last checkpoint
        (run / name).unlink()
    assert_refused(run, "nothing is left to train: .* so optim.lr 1.0 instead of 0.01", "optim.lr=1")
    result, _ = fit(tiny("task.data_dir=elsewhere"), run, resume=True)
    assert result["step"] == 16
    assert_same_bits(bits(run), bits(whole))


def test_initial_weights_may_move_but_not_be_others(run, tmp_path):
    start = tmp_path / "start.safetensors"
    shutil.copy(run / "model.safetensors", start)
    config = tiny(f"task.weights={start}")
    die_in(7, config, tmp_path / "cut")
    moved = start.rename(tmp_path / "moved.safetensors")
    other, nowhere = run / "checkpoints/step-000000015/model.safetensors", tmp_path / "nowhere.safetensors"
    for wrong in (other, nowhere, "none"):
        words = re.escape(f"task.weights {wrong} instead of {start}, which would make it another run")
        assert_refused(tmp_path / "cut", words, f"task.weights={wrong}")
    fit(override(config, [f"task.weights={moved}"]), tmp_path / "cut", resume=True)
