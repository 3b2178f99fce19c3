"""Going on with changes: what stays the same run is taken, what would be another is refused and leaves no trace."""

import json
import re
import shutil

import pytest
from train_worlds import STEPS_PER_EPOCH, assert_same_bits, bits, die_in, fit, tiny

from acutance.errors import AcutanceError
from acutance.lab.train import override
from acutance.lab.train.log import read_log
from acutance.lab.train.run import changes

MODEL = "task.model.mitigation=neutreno:0.6"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    fit(tiny(MODEL), folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def on_disk(folder):
    """All of it, but who held the lock last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def assert_refused(run, message, *changes, plain=(MODEL,)):
    before = on_disk(run)
    with pytest.raises(AcutanceError, match=message) as caught:
        fit(tiny(*plain, *changes), run, resume=True)
    assert "\n" not in str(caught.value)
    assert on_disk(run) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("task.model.depth=3", "task.model.depth 3 instead of 2"),
        ("task.model.heads=4", "task.model.heads 4 instead of 2"),
        ("task.model.dropout=0.2", "task.model.dropout 0.2 instead of 0.1"),
        ("task.model.mitigation=none", "task.model.mitigation none instead of neutreno:0.6"),
        ("task.fraction=0.2", "task.fraction 0.2 instead of 0.1"),
        ("task.augment.mixup=0.8", "task.augment.mixup 0.8 instead of 0.0"),
        ("task.weights=other.safetensors", "task.weights other.safetensors instead of none"),
        ("loop.seed=5", "loop.seed 5 instead of 0"),
        ("loop.batch_size=32", "loop.batch_size 32 instead of 16"),
        ("loop.precision=bf16", "loop.precision bf16 instead of fp32"),
        ("loop.ema=none", "loop.ema none instead of 0.9"),
    ],
)
def test_what_would_make_another_run_is_refused(run, change, words):
    assert_refused(run, f"run cannot go on with {re.escape(words)}, which would make it another", change)
    assert_refused(run, re.escape(words), change, "loop.epochs=3")  # with steps left, too


def test_all_such_fields_are_named(run):
    several = ("loop.seed=5", "loop.batch_size=32", "loop.log_every=4")
    assert_refused(run, r"with loop\.batch_size 32 instead of 16, loop\.seed 5 instead of 0, which", *several)


@pytest.mark.parametrize("change", ["optim.lr=1", "schedule.final=1e-3", "loop.log_every=7", "loop.epochs=2.001"])
def test_a_change_with_nothing_left_to_train_is_refused(run, change):
    words = rf"nothing is left to train: .*run is at step 16 of 16, so {re.escape(change.partition('=')[0])} "
    assert_refused(run, words, change)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(run):
    """As where run.json was changed by hand."""
    record = json.loads((run / "run.json").read_text())
    record["config"]["task"]["model"]["depth"] = 3
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


def cut_after_the_last_checkpoint(run):
    for name in ("result.json", "model.safetensors"):
        (run / name).unlink()


def test_a_run_whose_result_alone_is_missing_is_ended_wherever_its_data_lie(run, finished):
    cut_after_the_last_checkpoint(run)
    assert_refused(run, "nothing is left to train: .* so optim.lr 1.0 instead of 0.01", "optim.lr=1")
    result, _ = fit(tiny(MODEL, "task.data_dir=elsewhere"), run, resume=True)
    assert result["step"] == 16
    assert_same_bits(bits(run), bits(finished))


def test_a_finished_run_without_checkpoints_is_not_trained_again(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    message = "run is finished, and .*checkpoints holds no checkpoint to go on from: start anew with another --out"
    assert_refused(run, message, "loop.epochs=3")
    before = on_disk(run)
    assert fit(tiny(MODEL), run, resume=True)[0]["step"] == 16  # nothing was wanted
    assert on_disk(run) == before
    (run / "result.json").unlink()  # as of one that was being made longer
    assert_refused(run, message)


def test_a_run_that_was_cut_and_has_no_checkpoint_starts_over_and_says_so(tmp_path, finished):
    die_in(7, tiny(MODEL), tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints")
    _, printed = fit(tiny(MODEL), tmp_path / "cut", resume=True)
    assert "checkpoints holds no checkpoint: starting over from step 0" in printed
    assert_same_bits(bits(tmp_path / "cut"), bits(finished))


def test_what_a_run_started_from_may_move_but_not_be_another(run, tmp_path):
    start = tmp_path / "start.safetensors"
    shutil.copy(run / "model.safetensors", start)
    config = tiny(f"task.weights={start}")
    die_in(7, config, tmp_path / "cut")
    moved = start.rename(tmp_path / "moved.safetensors")
    other, nowhere = run / "checkpoints/step-000000015/model.safetensors", tmp_path / "nowhere.safetensors"
    for wrong in (other, nowhere, "none"):
        words = re.escape(f"task.weights {wrong} instead of {start}, which would make it another run")
        assert_refused(tmp_path / "cut", words, f"task.weights={wrong}", plain=())
    fit(override(config, [f"task.weights={moved}"]), tmp_path / "cut", resume=True)
