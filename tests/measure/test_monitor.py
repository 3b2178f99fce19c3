"""A monitor in a plain loop: training does not notice it, it reads what measure reads, and its files are read back."""

import json
import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from monitor_worlds import assert_same, build, draws, probe, train
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.measure.monitor import History

EVERYTHING = {"metrics": "all", "tap": ("block", "attention", "values", "final")}


def readings(monitor, *steps):
    """What it reads now, as each of these steps."""
    for step in steps:
        monitor.record(step)
    return [monitor.history[step].readings for step in steps]


@pytest.mark.parametrize("between_forwards", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_training_gives_the_same_bits_with_and_without(device, between_forwards):
    """The probe is moved to the model, and the device's generator, which dropout draws from, is left alone.

    Read inside autocast, weights that are cast without gradients must not be cached: training would find them.
    """
    model = build()
    monitor = ac.Monitor(model, probe(), every=2, autocast=torch.bfloat16, **EVERYTHING)
    monitor.record()
    reads = {"amid": monitor.record} if between_forwards else {"after_step": lambda _: monitor.step()}
    with sdpa_kernel(SDPBackend.MATH):  # gives the same bits each time
        expected = train(build().to(device), autocast=between_forwards)
        assert_same(train(model.to(device), autocast=between_forwards, **reads), expected)
    assert list(monitor.history) == ([0] if between_forwards else [0, 2, 4, 6])
    assert monitor.history[0].context["autocast"] == "bfloat16"


def test_precision_is_the_one_asked_for_and_the_one_stated():
    model = build()
    full, low = ac.Monitor(model, probe()), ac.Monitor(model, probe(), autocast=torch.bfloat16)
    before = readings(full, 0)
    with torch.autocast("cpu", torch.bfloat16):  # around the call it changes nothing
        assert readings(full, 1) == before
        expected = ac.measure(model, [probe()], metrics=full.history[0].metrics, progress=False)
    assert readings(low, 0) == [expected.readings] != before
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as Accelerate does to a model
    full.record(2)
    assert full.history[2].context["autocast"] == "bfloat16"
    half = ac.Monitor(build().bfloat16(), probe())  # the probe follows the weights
    half.record()
    assert half.history[0].context["dtype"] == "bfloat16"


class Drawing(nn.Module):
    """Draws at evaluation, from every generator."""

    def forward(self, images):
        return images + torch.randn(images.shape) + random.random() + np.random.rand()  # noqa: NPY002


class Merging(nn.Identity):
    """As adapters do: going to evaluation changes the weights, going back undoes it."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_randomness_at_evaluation_is_the_same_each_time_and_nobody_is_told():
    model = nn.Sequential(Drawing(), Merging(), build()).train()
    monitor = ac.Monitor(model, probe())
    _, expected = draws(seed=3), draws()
    draws(seed=3)
    first = readings(monitor, 0)
    assert draws() == expected
    assert readings(monitor, 1) == first
    assert (model[1].merged, model[1].training) == (False, True)


@pytest.mark.parametrize("form", [lambda x: (x, torch.zeros(4)), lambda x: {"images": x}, lambda x: x.double()])
def test_probes_of_every_form_give_the_same_and_are_copied(form):
    model, images = build(), probe()
    one, other = ac.Monitor(model, probe()), ac.Monitor(model, form(images))
    images.zero_()
    assert readings(one, 0) == readings(other, 0)


def test_a_compiled_model_trains_the_same_and_is_not_compiled_again():
    def compiled_training(every):
        torch.compiler.reset()
        compiles, model = CompileCounter(), build()
        run = torch.compile(model, backend=compiles)
        monitor = ac.Monitor(run, probe(), every=every, **EVERYTHING)
        after = train(model, run=run, after_step=lambda _: monitor.step())
        return after, compiles.frame_count, monitor

    expected, compiles, _ = compiled_training(every=1000)
    found, compiles_watched, monitor = compiled_training(every=2)
    assert_same(found, expected)
    assert compiles_watched == compiles > 0
    measured = ac.measure(monitor.model, [probe()], progress=False, **EVERYTHING)
    assert monitor.history[6].readings == measured.readings
    assert monitor.history[6].context == measured.context | {"step": 6}


@pytest.mark.parametrize(
    ("every", "steps", "read"),
    [(3, (1, 1, 2, 3, 3, 3, 4, 7, 7, 8, 14), [3, 7, 14]), (10, range(104, 121), [110, 120])],
    ids=["numbers that repeat, and jump over a multiple", "a late start"],
)
def test_optimiser_steps_are_counted_not_calls(every, steps, read):
    monitor = ac.Monitor(build(), probe(), every=every)
    for step in steps:
        monitor.step(step)
    assert list(monitor.history) == read


def test_an_interruption_in_the_middle_of_a_reading_leaves_the_model_as_it_was():
    model, interrupt = build().train(), Mock(side_effect=KeyboardInterrupt)
    _, expected = draws(seed=3), draws()
    draws(seed=3)
    with model.vit.blocks[1].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
        ac.Monitor(model, probe(), **EVERYTHING).record()
    assert draws() == expected
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_reading_that_is_not_finite_warns_and_lets_training_go_on():
    model = build()
    monitor = ac.Monitor(model, probe(), every=1)
    with torch.no_grad():
        model.vit.blocks[0].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.warns(AcutanceWarning, match=r"step 1 was not recorded.*layer 1"):
        monitor.step()
    assert not monitor.history


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"probe": {"text": "words"}}, "not dict of str: tokenise it first"),
        ({"probe": torch.zeros(0, 1, 8, 8)}, "needs a probe that holds"),
        *[({"probe": nothing}, r"a batch must be .*, not (NoneType|list)") for nothing in (None, [])],
        ({"tap": "x"}, "unknown tap x"),
        ({"every": 0}, "1 or more, not 0"),
        ({"model": nn.Linear(2, 2)}, "no attention"),
    ],
)
def test_wrong_choices_are_refused_at_once(wrong, message):
    with pytest.raises(AcutanceError, match=message):
        ac.Monitor(**{"model": build(), "probe": probe(), **wrong})


# What it writes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "monitor.jsonl"


def recorded(path, *steps, **options):
    monitor = ac.Monitor(build(), probe(), jsonl=path, **options)
    for step in steps:
        monitor.record(step)
        assert json.loads(path.read_text().splitlines()[-1])["step"] == step, "it is there at once"
    return monitor


def test_what_a_restarted_run_has_not_reached_again_does_not_count(path):
    recorded(path, 0, 100, 200)
    assert list(recorded(path, 0, 50).history) == list(History.load(path)) == [0, 50]
    assert len(path.read_text().splitlines()) == 5, "nothing is ever taken out of the file"
    for call in ("step", "record"):
        monitor = ac.Monitor(build(), probe(), jsonl=path)
        with pytest.raises(AcutanceError, match=r"up to 50.*monitor\.step\(step\)"):
            getattr(monitor, call)()
    monitor.step(101)
    monitor.step()  # counted on from there
    monitor.record()
    assert list(monitor.history) == [0, 50, 102]


@pytest.mark.parametrize("cut", [1, 30])
def test_a_line_cut_off_by_a_crash_is_dropped(path, cut):
    recorded(path, 0, 100)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert list(History.load(path)) == [0]
    recorded(path, 100)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["my diary\n", '{"step": 3}\n', '{"format": "other/1"}\n', "[]\n"])
def test_another_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "diary"
    path.write_text(content)
    with pytest.raises(AcutanceError, match="line 1"):
        ac.Monitor(build(), probe(), jsonl=path)
    assert path.read_text() == content
    with pytest.raises(FileNotFoundError):
        History.load(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("is_own", [False, True], ids=["a folder", "a writer of the caller"])
def test_tensorboard_gets_every_layer_and_one_chart_per_metric_at_once(tmp_path, is_own):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    options = {"metrics": ["token_cosine", "attention_entropy"], "tap": ["block", "attention"]}
    target = SummaryWriter(str(tmp_path), max_queue=1000, flush_secs=1000) if is_own else tmp_path
    monitor = ac.Monitor(build(), probe(), tensorboard=target, every=1, **options)
    monitor.step()
    monitor.step()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == (
        {f"token_cosine block/layer {layer:02d}" for layer in (0, 1, 2)}
        | {f"token_cosine attention/layer {layer:02d}" for layer in (1, 2)}
        | {f"attention_entropy attention_matrix/layer {layer:02d}" for layer in (1, 2)}
    )
    found = {event.step: event.value for event in events.Scalars("token_cosine block/layer 02")}
    expected = {step: monitor.history[step]["token_cosine", "block"][2] for step in (1, 2)}
    assert found == pytest.approx(expected, rel=1e-6)
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert len(list(tmp_path.glob("events*"))) == 1


def test_frame_and_picture_hold_every_layer_over_the_steps():
    model = build(depth=3)
    monitor = ac.Monitor(model, probe(), metrics=["token_cosine", "attention_entropy"], tap=["block", "attention"])
    for step in (0, 10, 20):
        monitor.record(step)
        with torch.no_grad():
            model.vit.blocks[0].mlp.fc2.bias += 1
    last = [monitor.history[step]["token_cosine", "block"][3] for step in (0, 10, 20)]
    frame = monitor.history.to_frame()
    assert len(frame) == 3 * (4 + 3 + 3)
    chosen = frame[(frame.layer == 3) & (frame.metric == "token_cosine") & (frame.tap == "block")]
    assert (chosen["step"].tolist(), chosen["mean"].tolist()) == ([0, 10, 20], last)
    axes = {axis.get_title(): axis for axis in monitor.plot().axes}
    assert {"token_cosine (block)", "token_cosine (attention)", "attention_entropy (attention_matrix)"} < set(axes)
    lines = axes["token_cosine (block)"].get_lines()
    assert len({line.get_color() for line in lines}) == len(lines) == 4
    np.testing.assert_array_equal(lines[3].get_xydata(), np.transpose([[0, 10, 20], last]))
    assert History().to_frame().empty
    with pytest.raises(AcutanceError, match="nothing was recorded"):
        History().plot()
