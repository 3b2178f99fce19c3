"""What the loop does on the way: logs, records, measurements, where it stops, what it says."""

import io
import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tiny_runs import MODEL, STEPS_PER_EPOCH, assert_same_bits, bits, fit, tiny, weights_at
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.tasks import BatchSlice, Task
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import DivergedError, Run, checkpointer, log
from acutance.lab.train.log import NO_SDPA, Bar, Log, attention_backend, locate, read_log
from acutance.measure.monitor import History

LINE = r"^step \d+ of 16  epoch \d\.\d\d  loss \d\.\d{4}  [\d,]+ images/s  \d:\d\d:\d\d left$"
WATCHED = ("loop.monitor_every=6", "loop.deterministic=true", "loop.graph=true")


def task_of(config):
    return ClassificationTask(config.task, seed=config.loop.seed, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is watched and logged at every chance."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "SECONDS_BETWEEN_LINES", 0)
        return folder, *fit(tiny(*WATCHED), folder, recipe="tiny")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, *fit(tiny(), folder)


def test_the_log_has_the_loss_the_rate_the_speed_and_the_scores_of_the_exported_models(finished):
    folder, result, _ = finished
    lines = read_log(folder)
    assert [line["step"] for line in lines] == [3, 5, 8, 10, 13, 15, 16]  # every 3, where it is saved or evaluated
    assert all(line["images/s"] > 0 and math.isfinite(line["loss"]) for line in lines)
    assert lines[0]["lr"] == pytest.approx(1e-2 * 2 / 4)  # the third step of a warm-up of half an epoch
    evaluated = {line["step"]: line["val/top1"] for line in lines if "val/top1" in line}
    assert list(evaluated) == [8, 16]
    assert result["step"] == 2 * STEPS_PER_EPOCH
    assert result["scores"]["top1"] == evaluated[16]
    assert result["best"]["score"] == max(evaluated.values())
    task = task_of(tiny())
    assert task.evaluate(ac.load(folder / "model.safetensors")) == result["scores"]
    assert task.evaluate(ac.load(folder / "best.safetensors"))["top1"] == result["best"]["score"]
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    losses = {point.step: point.value for point in found.Scalars("loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines})


def test_it_records_and_says_what_the_run_is_made_of_and_how_it_goes(finished, plain):
    record = json.loads((finished[0] / "run.json").read_text())
    session = record["sessions"][0]
    assert (record["recipe"], record["start"], session["versions"]["torch"]) == ("tiny", None, torch.__version__)
    assert (session["hardware"]["cores"] > 0, len(session["git"]["commit"])) == (True, 40)
    assert Run(finished[0]).config() == tiny(*WATCHED)
    printed = finished[2]  # no graph without a GPU
    assert "ViT of 1,490 parameters on CPU: single, 1 × 1 parts of a batch of 16, fp32, deterministic\n" in printed
    assert "attention: SDPA flash for 2 × (16, 2, 17, 4) float32" in printed
    assert len(re.findall(LINE, printed, re.MULTILINE)) >= 4  # without a terminal, a line now and then
    assert not re.findall(LINE, plain[2], re.MULTILINE)


def test_smoothness_is_measured_on_the_way_and_training_does_not_notice(finished, plain):
    history = History.load(finished[0] / "monitor.jsonl")
    assert list(history) == [0, 6, 12, 16]
    assert ("hfc_lfc_frobenius", "block") in {(r.metric, r.tap) for r in history[16].readings}
    assert_same_bits(bits(plain[0]), bits(finished[0]))


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_shows_how_far_how_fast_and_how_long_in_one_process(shown):
    output = io.StringIO()
    bar = Bar(Console(file=output, force_terminal=True, width=160), first=4, total=8, unit="images", shown=shown)
    with bar.progress:
        bar.advance(16)
        assert bar.tell(epoch=1.25, loss=0.5) > 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    found = re.search(r"epoch 1\.25  loss 0\.5000 .*5/8 [\d,]+ images/s 0:00:00 left [\d:-]+", text)
    assert found if shown else text.strip() == ""


def test_steps_are_deterministic_and_in_bf16_if_asked_and_all_is_put_back(tmp_path, monkeypatch):
    seen, loss = set(), ClassificationTask.loss

    def watched(self, model, batch):
        seen.add((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        seen.add(model(batch[0]).dtype)
        return loss(self, model, batch)

    monkeypatch.setattr(ClassificationTask, "loss", watched)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fit(tiny("loop.epochs=0.25", "loop.deterministic=true", "loop.precision=bf16"), tmp_path / "run")
    assert seen >= {(True, ":4096:8"), torch.bfloat16}
    assert (False, None) not in seen
    assert not torch.are_deterministic_algorithms_enabled()
    assert {value.dtype for value in weights_at(tmp_path / "run", 2).values()} == {torch.float32}


def test_the_step_is_that_of_the_plain_formula(tmp_path):
    """A loop written out by hand, without any of the machinery."""
    config = tiny("loop.ema=null", "loop.epochs=0.5", "loop.seed=1", "optim.name=sgd", "optim.clip=0.1")
    fit(config, tmp_path / "run")
    task = task_of(config)
    torch.manual_seed(mixed_seed(1))
    model = task.build_model()
    spared = model.no_weight_decay()
    groups = [
        {"params": [p], "weight_decay": 0.05 if p.ndim > 1 and n not in spared else 0.0}
        for n, p in model.named_parameters()
    ]
    optimiser = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)  # whose steps show the clipping
    for step, (images, targets) in zip(range(4), task.batches(16, 0, BatchSlice()), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * step / 4  # half an epoch of warm-up
        torch.manual_seed(mixed_seed(1, step, 0))  # dropout is a function of seed, step and slice
        loss = -(targets * model(images).log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.2
        optimiser.step()
    trained = ac.load(tmp_path / "run/model.safetensors").state_dict()
    torch.testing.assert_close(trained, model.state_dict(), rtol=1e-5, atol=1e-7)


def test_accumulated_parts_are_one_batch(tmp_path):
    for name, change in (("one", "loop.accumulate=1"), ("other", "loop.accumulate=4")):
        fit(tiny(change, "optim.name=sgd", "task.model.dropout=0", "loop.epochs=0.5"), tmp_path / name)
    one, four = (weights_at(tmp_path / name, 4) for name in ("one", "other"))
    torch.testing.assert_close(four, one, rtol=1e-4, atol=1e-6)
    losses = [[line["loss"] for line in read_log(tmp_path / name)] for name in ("one", "other")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def built_with(monkeypatch, change):
    real = ClassificationTask.build_model

    def build(self):
        model = real(self)
        change(model)
        return model

    monkeypatch.setattr(ClassificationTask, "build_model", build)


class OverflowsInStepSeven(nn.Module):
    """Knows the step by the seed the loop sets for it."""

    def forward(self, x):
        return x * math.inf if torch.initial_seed() == mixed_seed(0, 6, 0) else x


@pytest.mark.parametrize("place", ["the batch, before any module", "layer 2 (blocks.1.mlp.act, OverflowsInStepSeven)"])
def test_a_nan_stops_with_step_place_and_last_checkpoint(tmp_path, monkeypatch, place):
    real = ClassificationTask.batches

    def poisoned(self, batch_size, first_step, part):
        for now, (images, targets) in enumerate(real(self, batch_size, first_step, part), first_step):
            yield (images.clone().fill_(math.nan) if now >= 6 else images), targets

    if "batch" in place:
        monkeypatch.setattr(ClassificationTask, "batches", poisoned)
    else:
        built_with(monkeypatch, lambda model: setattr(model.blocks[1].mlp, "act", OverflowsInStepSeven()))
    message = rf"became nan in step 7, first in .*{re.escape(place)}.*step-000000005 \(step 5\)"
    with pytest.raises(DivergedError, match=message):
        fit(tiny(), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints/step-000000010").exists()


def test_an_update_that_overflows_is_not_saved_as_good(tmp_path, monkeypatch):
    """The loss of the step is finite, the weights after it are not."""
    built_with(monkeypatch, lambda model: model.blocks[0].attn.qkv.bias.register_hook(lambda g: g * math.inf))
    message = r"after step 1, whose loss was finite, blocks.0.attn.qkv.bias hold.*checkpoint is .*step-000000000\."
    with pytest.raises(DivergedError, match=message):
        fit(tiny("loop.checkpoint_every=1", "optim.clip=null", "schedule.warmup=0"), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000000000"]
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert "in the loss itself" in locate(model, lambda: model(torch.ones(1, 2)).sum() * math.nan)
    assert locate(model, lambda: model(torch.ones(1, 2)).sum()).startswith("nowhere")
    assert all(value.isfinite().all() for value in weights_at(tmp_path / "run", 0).values())


@pytest.mark.parametrize(
    ("where", "name", "step", "words"),
    [
        (checkpointer, "atomic_write", "step-000000000", "checkpoint of step 0 .*No checkpoint was saved yet"),
        (checkpointer, "atomic_write", "step-000000010", "checkpoint of step 10 .*is .*step-000000005.*--resume"),
        (checkpointer, "save", "", r"best\.safetensors .*--resume"),
        (Log, "write", "", "the log .*--resume"),
        (Run, "write_result", "", "the result .*--resume"),
    ],
)
def test_a_full_disk_stops_the_run_and_names_what_is_left(tmp_path, monkeypatch, plain, where, name, step, words):
    real = getattr(where, name)

    def write(*given, **named):
        if step in str(given[0]):
            raise OSError(28, "No space left on device")
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, write)
        with pytest.raises(AcutanceError, match=words) as caught:
            fit(tiny(), tmp_path / "run")
        assert "could not be written: [Errno 28] No space left" in str(caught.value)
    fit(tiny(), tmp_path / "run", resume=True)
    assert_same_bits(bits(tmp_path / "run"), bits(plain[0]))


def test_a_model_without_sdpa_says_so_and_random_numbers_are_left_alone():
    model = ac.models.ViT(**replace(MODEL, attention="linear").to_dict())
    state = torch.get_rng_state()
    assert attention_backend(model, lambda: model(torch.randn(3, 1, 8, 8))) == NO_SDPA
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("task", "how"), [(ClassificationTask, "as read on the batch"), (Task, "taken as 0")])
def test_a_run_whose_spectrum_crosses_the_bound_is_warned_of_at_its_end(tmp_path, monkeypatch, task, how):
    """−ψ² beyond −2/(1 + μ_min), with μ_min as attention has it on the task's probe, or 0 where it has none."""
    built_with(monkeypatch, lambda model: [site.mitigation.psi.data.fill_(1.6) for site in ac.sites.find(model)])
    monkeypatch.setattr(ClassificationTask, "inputs", task.inputs)
    with pytest.warns(AcutanceWarning, match=rf"layers 1 \(λ = -2\.56 lies beyond .* = -.*μ_min {how}"):
        fit(tiny("loop.epochs=0.25", "optim.lr=1e-6", "task.model.mitigation=eigen:negative"), tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("higher", "scores", "best"),
    [
        (True, (7.5, 12.5, 2.5), {"step": 2, "score": 12.5}),
        (False, (7.5, 12.5, 2.5), {"step": 3, "score": 2.5}),
        (True, (math.nan, 12.5, math.inf), {"step": 2, "score": 12.5}),
        (True, (math.nan, math.inf, math.nan), None),
    ],
)
def test_the_best_is_the_highest_or_the_lowest_number_as_the_task_says(tmp_path, monkeypatch, higher, scores, best):
    found = iter(scores)
    monkeypatch.setattr(ClassificationTask, "evaluate", lambda *_, **__: {"top1": next(found)})
    monkeypatch.setattr(ClassificationTask, "higher_is_better", higher)
    result, _ = fit(tiny("loop.epochs=0.375", "loop.evaluate_every=0.125"), tmp_path / "run")
    assert (result["best"], result["scores"]["top1"]) == (best, scores[-1] if math.isfinite(scores[-1]) else None)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "run/log.jsonl").open()]
    assert [line["val/top1"] for line in lines] == [score if math.isfinite(score) else None for score in scores]
