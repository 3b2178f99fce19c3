"""2N steps straight are N steps, death, N steps: bit for bit. What would make another run is refused."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import MODEL, STEPS_PER_EPOCH, assert_same_bits, bits, die_in, fit, stepping, tiny

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.tasks.language import LanguageTaskConfig
from acutance.lab.tasks.segmentation import SegmentationConfig
from acutance.lab.train import Run, StoppedError, override
from acutance.lab.train.log import interruptible, read_log
from acutance.lab.train.run import changes
from acutance.lab.train.start import described, initial_weights
from acutance.models import LanguageConfig, LanguageModel, SegmenterConfig, ViT
from forked import FORKS

WORDS = {"vocabulary": 30, "dim": 8, "depth": 1, "heads": 2, "hidden": 12, "cutoffs": (5, 9)}
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


def on_disk(folder):
    """All of it, but who held the lock last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def assert_refused(run, message, *changes):
    before = on_disk(run)
    with pytest.raises(AcutanceError, match=message) as caught:
        fit(tiny(*changes), run, resume=True)
    assert "\n" not in str(caught.value)
    assert on_disk(run) == before


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
    steps = [line["step"] for line in logs[1]]  # log points differ where the run was cut
    assert steps == sorted(set(steps))


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
    assert_refused(tmp_path / "cut", "none of the checkpoints")  # which stay, or it would then be trained over
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


def test_kill_9_at_any_moment_loses_nothing_that_was_saved(whole, tmp_path):
    """From outside and again and again, as soon as a file is being written or has been."""
    folder = tmp_path / "cut"
    for moment in ("checkpoints/.writing-step-000000005", "best.safetensors", "checkpoints/step-000000015"):
        begun = (folder / "run.json").exists()
        child = FORKS.Process(target=fit, args=(tiny(), folder), kwargs={"resume": begun})
        child.start()
        while child.is_alive() and not (folder / moment).exists():
            time.sleep(0.0005)
        child.kill()
        child.join()
        assert child.exitcode in (-signal.SIGKILL, 0)
    fit(tiny(), folder, resume=True)
    assert_same_bits(bits(folder), bits(whole))
    assert not list(folder.glob("checkpoints/.writing*"))


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
    assert_refused(run, "trained by adamw, whose moments muon cannot use", "optim.name=muon")
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
    assert_refused(run, "run is at step 24, but loop.epochs=1 ends after 8", "loop.epochs=1")  # nor cut short
    assert json.loads((run / "run.json").read_text())["sessions"][-1]["changed"] == {"loop.epochs": [2.0, 3.0]}
    shutil.rmtree(run / "checkpoints")
    message = "run is finished, and .*checkpoints holds no checkpoint to resume from"
    assert_refused(run, message, "loop.epochs=4")
    assert fit(tiny("loop.epochs=3"), run, resume=True)[0]["step"] == 3 * STEPS_PER_EPOCH  # nothing was wanted
    (run / "result.json").unlink()  # as of one that was being made longer
    assert_refused(run, message, "loop.epochs=3")


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


def saved(folder, **changes):
    torch.manual_seed(3)
    return ac.save(ViT(**replace(MODEL, **changes).to_dict()), folder / "start.safetensors")


def starting_from(path, *changes):
    return tiny(f"task.weights={path}", "loop.epochs=0.25", *changes)


def test_what_differs_is_said_and_recorded(tmp_path):
    path = saved(tmp_path, mitigation="neutreno:0.3", dropout=0.0)
    config = starting_from(path, "task.model.mitigation=neutreno:0.6", "optim.lr=0", "schedule.warmup=0")
    _, printed = fit(config, tmp_path / "run")
    words = "a ViT: mitigation neutreno:0.3 there, neutreno:0.6 here; dropout 0.0 there, 0.1 here"
    assert f"starts from {path}, {words}\n" in printed
    start = json.loads((tmp_path / "run/run.json").read_text())["start"]
    assert start["differs"] == {"mitigation": ["neutreno:0.3", "neutreno:0.6"], "dropout": [0.0, 0.1]}
    assert len(start["sha256"]) == 64
    before, after = ac.load(path), ac.load(tmp_path / "run/model.safetensors")  # nothing was learnt at a rate of 0
    assert torch.equal(after.blocks[1].attn.qkv.weight, before.blocks[1].attn.qkv.weight)


def test_the_recipe_of_a_run_is_named_and_published_weights_say_nothing(tmp_path):
    Run(tmp_path).begin(tiny(), "digits", 1)
    found = initial_weights(starting_from(saved(tmp_path)).task)
    assert described(found).endswith("a ViT of the recipe digits: the same model")
    torch.save({"model": {}}, tmp_path / "published.pth")
    save_file({"w": torch.ones(1)}, tmp_path / "other.safetensors")
    for name in ("published.pth", "other.safetensors"):
        assert "does not say what it was trained with" in described(
            initial_weights(starting_from(tmp_path / name).task)
        )


def test_an_encoder_is_compared_with_the_classifier_it_is_from(tmp_path):
    """Which has other classes and another image size: that is what an encoder is taken for."""
    sizes = {"image_size": 16, "patch_size": 2, "in_chans": 1, "dim": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0}
    model = SegmenterConfig(num_classes=11, drop_path=0.0, decoder_heads=2, **sizes)
    task = SegmentationConfig(dataset="camvid", model=model, encoder_weights=str(saved(tmp_path)))
    assert initial_weights(task)["differs"] == {"image_size": [8, 16], "dropout": [0.1, 0.0]}
    with pytest.raises(AcutanceError, match="trained with heads 2, and a model with heads 4"):
        initial_weights(replace(task, model=replace(model, heads=4)))
    saved(tmp_path, norm="post")  # the same tensors, for what a Segmenter has no choice of
    with pytest.raises(AcutanceError, match=r"norm post, and a model with norm pre .* else: start from other weights$"):
        initial_weights(task)


def test_a_language_model_is_compared_as_its_text_makes_it(tmp_path):
    """Vocabulary and cut-offs come from the text, so what the configuration says of them is no difference."""
    path = ac.save(LanguageModel(**WORDS), tmp_path / "start.safetensors")
    model = LanguageConfig(**WORDS | {"vocabulary": 267_735, "cutoffs": (5, 9, 20_000)})
    task = LanguageTaskConfig(corpus="wikitext-2", model=model, weights=str(path))
    assert initial_weights(task)["differs"] == {}
    with pytest.raises(AcutanceError, match=r"trained with cutoffs \[5, 9\], and a model with cutoffs \[5, 12\]"):
        initial_weights(replace(task, model=replace(model, cutoffs=(5, 12))))
    with pytest.raises(AcutanceError, match="holds a LanguageModel, and this run starts from a ViT"):
        initial_weights(starting_from(path).task)
    saved(tmp_path)
    with pytest.raises(AcutanceError, match="holds a ViT, and this run starts from a LanguageModel"):
        initial_weights(task)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"heads": 4}, "heads 4, and a model with heads 2 .*: --set task.model.heads=4"),
        ({"mitigation": "eigen:negative"}, "with eigen:negative .*acutance.fold turns an eigen"),
        ({"dim": 16}, "does not fit the model .*of another size"),
        ("nowhere.safetensors", "there is no .*nowhere.safetensors to start from .*task.weights.*: train it first"),
        ("begun", "is a folder: name the file, --set task.weights=.*begun/model.safetensors"),
        ("begun/model.safetensors", "its run is not finished. To go on"),
        ("damaged.safetensors", "is not a safetensors file, or it is damaged"),
    ],
)
def test_what_cannot_be_meant_or_is_not_there_leaves_no_run_behind(tmp_path, start, message):
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    Run(tmp_path / "begun").begin(tiny(), "digits", 1)
    path = tmp_path / start if isinstance(start, str) else saved(tmp_path, **start)
    with pytest.raises(AcutanceError, match=message):
        fit(starting_from(path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_to_the_same_bits_when_what_it_started_from_is_gone(tmp_path):
    """Exports on the way read the file no more, either."""
    config = starting_from(saved(tmp_path), "task.model.mitigation=eigen:negative", "loop.epochs=1.5")
    fit(config, tmp_path / "whole")
    die_in(7, config, tmp_path / "cut")
    (tmp_path / "start.safetensors").unlink()
    fit(config, tmp_path / "cut", resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))
