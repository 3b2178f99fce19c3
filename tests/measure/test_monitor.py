"""A monitor in a plain loop: training does not notice it, and it reads what measure reads."""

import random

import numpy as np
import pytest
import torch
from monitor_worlds import assert_same, build, draws, probe, seed_everything, train
from torch import nn
from torch._dynamo.testing import CompileCounter

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning

EVERYTHING = {"metrics": "all", "tap": ("block", "attention", "values", "final")}


def test_training_gives_the_same_bits_with_and_without():
    expected = train(build())
    model = build()
    monitor = ac.Monitor(model, probe(), every=2, **EVERYTHING)
    monitor.record()
    assert_same(train(model, after_step=lambda _: monitor.step()), expected)
    assert list(monitor.history) == [0, 2, 4, 6]


def test_reading_before_and_between_forwards_disturbs_neither():
    """Inside autocast: weights cast without gradients, were they cached, would have none in training either."""
    expected = train(build(), autocast=True)
    model = build()
    monitor = ac.Monitor(model, probe(), autocast=torch.bfloat16)
    assert_same(train(model, autocast=True, amid=monitor.record), expected)
    assert monitor.history[0].context["autocast"] == "bfloat16"


def test_a_recording_equals_a_measurement():
    model = build().train()
    monitor = ac.Monitor(model, probe(), every=1, **EVERYTHING)
    torch.manual_seed(11)
    monitor.step()
    expected = ac.measure(model, [probe()], progress=False, **EVERYTHING)
    assert monitor.history[1].readings == expected.readings
    context = monitor.history[1].context
    assert context["step"] == 1
    assert context["seed"] == torch.initial_seed() == expected.context["seed"] == 11


def test_precision_is_the_one_asked_for_and_the_one_stated():
    model = build()
    low, full = ac.Monitor(model, probe(), autocast=torch.bfloat16), ac.Monitor(model, probe())
    low.record()
    full.record(0)
    with torch.autocast("cpu", torch.bfloat16):  # around the call it changes nothing
        full.record(1)
        expected = ac.measure(model, [probe()], metrics="token_cosine", progress=False)
    np.testing.assert_array_equal(low.history[0]["token_cosine"], expected["token_cosine"])
    assert (low.history[0]["token_cosine"] != full.history[0]["token_cosine"]).any()
    assert full.history[1].readings == full.history[0].readings
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as Accelerate does to a model
    full.record(2)
    assert full.history[2].context["autocast"] == "bfloat16"


class Drawing(nn.Module):
    """Draws at evaluation, from every generator."""

    def forward(self, images):
        return images + torch.randn(images.shape) + random.random() + np.random.rand()  # noqa: NPY002


def test_randomness_at_evaluation_is_the_same_each_time_and_leaves_no_trace():
    model = nn.Sequential(Drawing(), build())
    monitor = ac.Monitor(model, probe())
    seed_everything()
    expected = draws()
    seed_everything()
    monitor.record(0)
    assert draws() == expected
    monitor.record(1)
    assert monitor.history[0].readings == monitor.history[1].readings


class Merging(nn.Identity):
    """As adapters do: going to evaluation changes the weights, going back undoes it."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_modules_that_act_on_a_change_of_mode_are_not_told():
    model = nn.Sequential(Merging(), build()).train()
    ac.Monitor(model, probe()).record()
    assert not model[0].merged
    assert model[0].training


@pytest.mark.parametrize("form", [lambda x: (x, torch.zeros(4)), lambda x: {"images": x}, lambda x: x.double()])
def test_probes_of_every_form_give_the_same_and_are_copied(form):
    model, images = build(), probe()
    one, other = ac.Monitor(model, probe()), ac.Monitor(model, form(images))
    images.zero_()
    one.record()
    other.record()
    assert one.history[0].readings == other.history[0].readings


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
    assert monitor.history[6].readings == ac.measure(monitor.model, [probe()], progress=False, **EVERYTHING).readings


def test_a_probe_follows_the_weights_into_half_precision():
    monitor = ac.Monitor(build().bfloat16(), probe())
    monitor.record()
    assert monitor.history[0].context["dtype"] == "bfloat16"


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
    model = build().train()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.vit.blocks[1].register_forward_hook(interrupt)
    seed_everything()
    expected = draws()
    seed_everything()
    with pytest.raises(KeyboardInterrupt):
        ac.Monitor(model, probe(), **EVERYTHING).record()
    hook.remove()
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


@pytest.mark.parametrize("nothing", [None, [], {"text": "words"}, torch.zeros(0, 1, 8, 8)])
def test_no_probe_is_refused_at_once(nothing):
    with pytest.raises(AcutanceError, match="needs a probe"):
        ac.Monitor(build(), nothing)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"tap": "x"}, "unknown tap x"), ({"every": 0}, "1 or more, not 0"), ({"model": nn.Linear(2, 2)}, "no attention")],
)
def test_wrong_choices_are_refused_at_once(wrong, message):
    with pytest.raises(AcutanceError, match=message):
        ac.Monitor(**{"model": build(), "probe": probe(), **wrong})
