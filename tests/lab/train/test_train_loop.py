"""What the loop does on the way: logs, records, readings, where it stops, what it says."""

import json
import math
import os
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from train_worlds import STEPS_PER_EPOCH, assert_same_bits, bits, fit, tiny

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.tasks import BatchSlice, Task
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import DivergedError, Run, checkpointer, log
from acutance.lab.train.diverged import locate
from acutance.lab.train.log import NO_SDPA, attention_backend, read_log
from acutance.measure.monitor import History


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    result, printed = fit(tiny("loop.monitor_every=6", "loop.deterministic=true"), folder, recipe="tiny")
    return folder, result, printed


def test_the_log_has_the_loss_the_rate_the_speed_and_the_scores(finished):
    folder, result, _ = finished
    lines = read_log(folder)
    assert [line["step"] for line in lines] == [3, 5, 8, 10, 13, 15, 16]  # every 3, where it is saved or evaluated
    assert all(line["images/s"] > 0 for line in lines)
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[0]["lr"] == pytest.approx(1e-2 * 2 / 4)  # the third step of a warm-up of half an epoch
    evaluated = {line["step"]: line["val/top1"] for line in lines if "val/top1" in line}
    assert list(evaluated) == [8, 16]
    assert result["scores"]["top1"] == evaluated[16]
    assert result["best"]["score"] == max(evaluated.values())


def test_tensorboard_has_the_same_numbers(finished):
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event.EventAccumulator(str(finished[0] / "tensorboard"))
    found.Reload()
    losses = {point.step: point.value for point in found.Scalars("loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in read_log(finished[0])})


def test_the_record_says_what_the_run_is_made_of(finished):
    record = json.loads((finished[0] / "run.json").read_text())
    assert record["recipe"] == "tiny"
    assert record["config"]["loop"]["seed"] == 0
    session = record["sessions"][0]
    assert session["versions"]["torch"] == torch.__version__
    assert session["hardware"]["cores"] > 0
    assert "git" in session
    assert Run(finished[0]).config() == tiny("loop.monitor_every=6", "loop.deterministic=true")


def test_it_says_what_it_runs_on_and_with_which_attention(finished):
    assert "ViT of 1,490 parameters on CPU" in finished[2]
    assert "single, 1 × 1 parts of a batch of 16, fp32, deterministic" in finished[2]
    assert "attention: SDPA flash for 2 × (16, 2, 17, 4) float32" in finished[2]


@pytest.mark.parametrize("wanted", [True, False])
def test_steps_are_deterministic_if_asked_and_it_is_put_back(tmp_path, monkeypatch, wanted):
    seen, loss = set(), ClassificationTask.loss

    def watched(*given):
        seen.add((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return loss(*given)

    monkeypatch.setattr(ClassificationTask, "loss", watched)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fit(tiny("loop.epochs=0.5", f"loop.deterministic={json.dumps(wanted)}"), tmp_path / "run")
    assert seen == {(wanted, ":4096:8" if wanted else None)}
    assert not torch.are_deterministic_algorithms_enabled()


def test_smoothness_is_read_on_the_way_and_training_does_not_notice(finished, tmp_path):
    history = History.load(finished[0] / "monitor.jsonl")
    assert list(history) == [0, 6, 12, 16]
    assert ("hfc_lfc_frobenius", "block") in {(r.metric, r.tap) for r in history[16].readings}
    fit(tiny(), tmp_path / "unwatched")
    assert_same_bits(bits(tmp_path / "unwatched"), bits(finished[0]))


def test_exported_models_load_and_score_what_was_recorded(finished):
    folder, result, _ = finished
    task = ClassificationTask(tiny().task, seed=0, device=torch.device("cpu"))
    assert task.evaluate(ac.load(folder / "model.safetensors")) == result["scores"]
    assert task.evaluate(ac.load(folder / "best.safetensors"))["top1"] == result["best"]["score"]


def test_the_step_is_that_of_the_plain_formula(tmp_path):
    """A loop written out by hand, without any of the machinery."""
    config = tiny("loop.ema=null", "loop.epochs=0.5")
    fit(config, tmp_path / "run")
    task = ClassificationTask(config.task, seed=0, device=torch.device("cpu"))
    torch.manual_seed(mixed_seed(0))
    model = task.build_model()
    spared = model.no_weight_decay()
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.ndim > 1 and n not in spared], "weight_decay": 0.05},
        {"params": [p for n, p in model.named_parameters() if p.ndim < 2 or n in spared], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=1e-2)
    for step, (images, targets) in zip(range(4), task.batches(16, 0, BatchSlice()), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * step / 4  # half an epoch of warm-up
        torch.manual_seed(mixed_seed(0, step, 0))  # dropout is a function of seed, step and share
        loss = -(targets * model(images).log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    trained = ac.load(tmp_path / "run/model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def poisoned(step):
    """The task's batches, whose images are no numbers from this step on."""
    real = ClassificationTask.batches

    def batches(self, batch_size, first_step, share):
        for now, (images, targets) in enumerate(real(self, batch_size, first_step, share), first_step):
            yield (images.clone().fill_(math.nan) if now >= step else images), targets

    return batches


def test_a_nan_in_the_data_stops_with_step_place_and_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(ClassificationTask, "batches", poisoned(6))
    message = r"became nan in step 7, first in the batch, before any module.*step-000000005 \(step 5\)"
    with pytest.raises(DivergedError, match=message):
        fit(tiny(), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints/step-000000010").exists()


class OverflowsInStepSeven(nn.Module):
    """Knows the step by the seed the loop sets for it."""

    def forward(self, x):
        return x * math.inf if torch.initial_seed() == mixed_seed(0, 6, 0) else x


def test_a_nan_in_a_layer_is_traced_to_that_layer(tmp_path, monkeypatch):
    real = ClassificationTask.build_model

    def build(self):
        model = real(self)
        model.blocks[1].mlp.act = OverflowsInStepSeven()
        return model

    monkeypatch.setattr(ClassificationTask, "build_model", build)
    place = r"first in the output of layer 2 \(blocks.1.mlp.act, OverflowsInStepSeven\)"
    with pytest.raises(DivergedError, match=rf"became nan in step 7, {place}.*step-000000005"):
        fit(tiny(), tmp_path / "run")


def test_an_update_that_overflows_is_not_saved_as_good(tmp_path, monkeypatch):
    """The loss of the step is finite, the weights after it are not."""
    real = ClassificationTask.build_model

    def build(self):
        model = real(self)
        model.blocks[0].attn.qkv.bias.register_hook(lambda gradient: gradient * math.inf)
        return model

    monkeypatch.setattr(ClassificationTask, "build_model", build)
    message = r"after step 1, whose loss was finite, blocks.0.attn.qkv.bias hold.*checkpoint is .*step-000000000\."
    with pytest.raises(DivergedError, match=message):
        fit(tiny("loop.checkpoint_every=1", "optim.clip=null", "schedule.warmup=0"), tmp_path / "run")
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1
    for path in (tmp_path / "run/checkpoints").iterdir():
        weights = checkpointer.read_checkpoint(path)[0]["model.safetensors"]
        assert all(value.isfinite().all() for value in weights.values())


def test_locate_says_when_only_the_loss_is_wrong_and_when_nothing_is():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert "in the loss itself" in locate(model, lambda: model(torch.ones(1, 2)).sum() * math.nan)
    assert locate(model, lambda: model(torch.ones(1, 2)).sum()).startswith("nowhere")


def test_a_full_disk_stops_the_run_and_names_what_is_left(tmp_path, monkeypatch):
    real = checkpointer._write_through

    def full(path, body):
        if "step-000000010" in str(path):
            raise OSError(28, "No space left on device", str(path))
        real(path, body)

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer, "_write_through", full)
        with pytest.raises(AcutanceError, match=r"No space left.*last good checkpoint is .*step-000000005.*--resume"):
            fit(tiny(), tmp_path / "run")
    fit(tiny(), tmp_path / "whole")
    fit(tiny(), tmp_path / "run", resume=True)
    assert_same_bits(bits(tmp_path / "run"), bits(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("where", "name", "what"),
    [(log.Log, "write", "the log"), (checkpointer, "save", r"best\.safetensors"), (Run, "write_result", "the result")],
)
def test_a_disk_without_room_for_the_rest_is_told_as_such(tmp_path, monkeypatch, where, name, what):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, full)
        with pytest.raises(AcutanceError, match=rf"{what} could not be written: .*No space left.* --resume"):
            fit(tiny(), tmp_path / "run")
    fit(tiny(), tmp_path / "run", resume=True)
    assert (tmp_path / "run/result.json").exists()


def test_a_run_without_room_for_its_first_checkpoint_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "_write_through", lambda path, body: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(AcutanceError, match="checkpoint of step 0 could not be written"):
        fit(tiny(), tmp_path / "run")


@pytest.mark.parametrize(
    ("kernel", "expected"), [("softmax", "SDPA flash"), ("linear", NO_SDPA), ("polynomial", NO_SDPA)]
)
def test_the_back_end_is_that_of_the_models_own_shapes(kernel, expected):
    options = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 8, "depth": 1, "heads": 2, "num_classes": 2}
    model = ac.models.ViT(attention=kernel, **options)
    state = torch.get_rng_state()
    found = attention_backend(model, lambda: model(torch.randn(3, 1, 8, 8)))
    assert found.startswith(expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_clipping_bounds_the_gradient(tmp_path):
    """With SGD without momentum a step is as long as its rate times the clipped norm."""
    config = tiny("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.clip=1e-3", "loop.epochs=0.125")
    config = type(config)(task=config.task, optim=config.optim, loop=config.loop)  # no warm-up
    fit(config, tmp_path / "run")
    before, after = (
        checkpointer.read_checkpoint(tmp_path / f"run/checkpoints/step-00000000{step}")[0]["model.safetensors"]
        for step in (0, 1)
    )
    length = torch.stack([(after[name] - before[name]).double().norm() for name in before]).norm()
    assert float(length) == pytest.approx(1e-2 * 1e-3, rel=1e-2)


def test_accumulated_parts_are_one_batch(tmp_path):
    common = ("optim.name=sgd", "task.model.dropout=0", "loop.epochs=0.5", "loop.ema=null")
    for parts in (1, 4):
        fit(tiny(f"loop.accumulate={parts}", *common), tmp_path / str(parts))
    one, four = (ac.load(tmp_path / name / "model.safetensors").state_dict() for name in ("1", "4"))
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=1e-4, atol=1e-6)
    losses = [[line["loss"] for line in read_log(tmp_path / name)] for name in ("1", "4")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_compiled_training_follows_the_plain_one(tmp_path, monkeypatch):
    calls = []
    quick = partial(torch.compile, backend="aot_eager")  # what the loop does is the same, and inductor takes a minute
    monkeypatch.setattr(torch, "compile", lambda model, **_: calls.append(model) or quick(model))
    for name, compiled in (("plain", "false"), ("compiled", "true")):
        fit(tiny("task.model.dropout=0", f"loop.compile={compiled}", "loop.epochs=0.5"), tmp_path / name)
    assert calls
    one, other = (ac.load(tmp_path / name / "model.safetensors").state_dict() for name in ("plain", "compiled"))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)


def test_without_a_gpu_nothing_is_recorded_and_nothing_changes(tmp_path):
    fit(tiny(), tmp_path / "plain")
    _, said = fit(tiny("loop.graph=true"), tmp_path / "asked")
    assert "CUDA graph" not in said
    assert_same_bits(bits(tmp_path / "asked"), bits(tmp_path / "plain"))


def test_bf16_casts_and_keeps_float32_weights(tmp_path):
    seen = []
    real = ac.models.ViT.forward_features

    def noted(self, images):
        out = real(self, images)
        seen.append(self.blocks[0].mlp.fc1(images.new_zeros(1, 8)).dtype)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ac.models.ViT, "forward_features", noted)
        fit(tiny("loop.precision=bf16", "loop.epochs=0.25"), tmp_path / "run")
    assert set(seen) == {torch.bfloat16}
    newest = checkpointer.checkpoint_paths(tmp_path / "run/checkpoints")[0]
    weights = checkpointer.read_checkpoint(newest)[0]["model.safetensors"]
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_epochs_and_steps(finished):
    assert finished[1]["step"] == 2 * STEPS_PER_EPOCH


@pytest.mark.parametrize(("psi", "crosses"), [(1.6, True), (1.0, False)])
@pytest.mark.parametrize("probe", ["probe", "no probe"])
def test_a_run_whose_spectrum_crosses_the_bound_is_warned_of_at_its_end(tmp_path, monkeypatch, psi, crosses, probe):
    """−ψ² beyond −2/(1 + μ_min), with μ_min as attention has it on the task's probe, or 0 where it has none."""
    build = ClassificationTask.build_model

    def steered(self):
        model = build(self)
        for site in ac.sites.find(model):
            site.mitigation.psi.data.fill_(psi)
        return model

    monkeypatch.setattr(ClassificationTask, "build_model", steered)
    if probe == "no probe":
        monkeypatch.setattr(ClassificationTask, "inputs", Task.inputs)
    config = tiny("loop.epochs=0.25", "optim.lr=1e-6", "task.model.mitigation=eigen:negative")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(config, tmp_path / "run")
    said = [str(w.message) for w in caught if issubclass(w.category, AcutanceWarning)]
    assert len(said) == crosses
    if crosses:
        assert "layers 1 (λ = -2.56, bound -" in said[0]
        assert ("μ_min as read on the batch" if probe == "probe" else "μ_min taken as 0") in said[0]
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_score_that_is_no_number_is_kept_as_none_and_never_the_best(tmp_path, monkeypatch):
    evaluate = ClassificationTask.evaluate
    found = iter([math.nan, math.inf, 12.5])

    def odd(self, model, **options):
        return {**evaluate(self, model, **options), "top1": next(found)}

    monkeypatch.setattr(ClassificationTask, "evaluate", odd)
    result, _ = fit(tiny("loop.epochs=2"), tmp_path / "run")
    assert result["scores"]["top1"] is None  # the second of two evaluations
    assert result["best"] is None
    assert (tmp_path / "run/model.safetensors").is_file()
    result, _ = fit(tiny("loop.epochs=3"), tmp_path / "run", resume=True)
    assert result["best"] == {"step": 3 * STEPS_PER_EPOCH, "score": 12.5}


@pytest.mark.parametrize(("higher", "step", "score"), [(True, 2, 12.5), (False, 3, 2.5)])
def test_the_best_is_the_highest_or_the_lowest_as_the_task_says(tmp_path, monkeypatch, higher, step, score):
    evaluate, found = ClassificationTask.evaluate, iter([7.5, 12.5, 2.5])

    def told(self, model, **options):
        return {**evaluate(self, model, **options), "top1": next(found)}

    monkeypatch.setattr(ClassificationTask, "evaluate", told)
    monkeypatch.setattr(ClassificationTask, "higher_is_better", higher)
    result, _ = fit(tiny("loop.epochs=3"), tmp_path / "run")
    assert result["best"] == {"step": step * STEPS_PER_EPOCH, "score": score}
