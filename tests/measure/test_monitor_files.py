"""What a monitor writes can be read back, after an interruption too, and looked at."""

import json
import sys

import numpy as np
import pytest
import torch
from monitor_worlds import build, probe

import acutance as ac
from acutance.errors import AcutanceError, MissingExtraError
from acutance.measure.monitor import History


@pytest.fixture
def path(tmp_path):
    return tmp_path / "monitor.jsonl"


def recorded(path, steps, **options):
    monitor = ac.Monitor(build(), probe(), jsonl=path, **options)
    for step in steps:
        monitor.record(step)
    return monitor


def test_every_line_stands_alone_and_is_there_at_once(tmp_path):
    path = tmp_path / "new" / "monitor.jsonl"
    monitor = ac.Monitor(build(), probe(), jsonl=path, every=1)
    for count in (1, 2, 3):
        monitor.step()
        lines = path.read_text().splitlines()
        assert len(lines) == count
        assert json.loads(lines[-1])["step"] == count
    assert dict(History.load(path)) == dict(monitor.history)


def test_a_resumed_run_continues_the_file(path):
    recorded(path, [0, 100, 200])
    second = ac.Monitor(build(seed=1), probe(), jsonl=path, every=100)
    first_try = second.history[200]
    for step in range(151, 301):  # resumed from a checkpoint of step 150
        second.step(step)
    assert list(second.history) == [0, 100, 200, 300]
    assert second.history[200].readings != first_try.readings
    assert len(path.read_text().splitlines()) == 5, "nothing is ever taken out of the file"
    assert dict(History.load(path)) == dict(second.history)


def test_what_a_restarted_run_has_not_reached_again_does_not_count(path):
    recorded(path, [0, 100, 200])
    assert list(recorded(path, [0, 50]).history) == list(History.load(path)) == [0, 50]


def test_resuming_without_a_number_is_refused(path):
    recorded(path, [0, 100])
    for call in ("step", "record"):
        monitor = ac.Monitor(build(), probe(), jsonl=path)
        with pytest.raises(AcutanceError, match=r"up to 100.*monitor\.step\(step\)"):
            getattr(monitor, call)()
    monitor.step(101)
    monitor.step()  # counted on from there
    monitor.record()
    assert list(monitor.history) == [0, 100, 102]


@pytest.mark.parametrize("cut", [1, 30])
def test_a_line_cut_off_by_a_crash_is_dropped(path, cut):
    recorded(path, [0, 100])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert list(History.load(path)) == [0]
    recorded(path, [100])
    assert path.read_bytes() == whole


def test_another_file_is_refused_and_left_alone(path, tmp_path):
    for content in ("my diary\n", '{"step": 3}\n', '{"format": "other/1"}\n', "[]\n"):
        path.write_text(content)
        with pytest.raises(AcutanceError, match="line 1"):
            ac.Monitor(build(), probe(), jsonl=path)
        assert path.read_text() == content
    with pytest.raises(FileNotFoundError):
        History.load(tmp_path / "missing.jsonl")


def test_tensorboard_gets_every_layer_and_one_chart_per_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"metrics": ["token_cosine", "attention_entropy"], "tap": ["block", "attention"]}
    monitor = ac.Monitor(build(), probe(), tensorboard=tmp_path, every=1, **options)
    monitor.step()
    monitor.step()
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == (
        {f"token_cosine block/layer {layer:02d}" for layer in (0, 1, 2)}
        | {f"token_cosine attention/layer {layer:02d}" for layer in (1, 2)}
        | {f"attention_entropy attention_matrix/layer {layer:02d}" for layer in (1, 2)}
    )
    found = events.Scalars("token_cosine block/layer 02")
    assert [event.step for event in found] == [1, 2]
    expected = [monitor.history[step]["token_cosine", "block"][2] for step in (1, 2)]
    np.testing.assert_allclose([event.value for event in found], expected, rtol=1e-6)
    assert "custom_scalars__config__" in events.Tags()["tensors"]


def test_tensorboard_writes_into_a_writer_of_the_caller_at_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path), max_queue=1000, flush_secs=1000) as writer:
        writer.add_scalar("loss", 1.0, 0)
        ac.Monitor(build(), probe(), metrics="token_cosine", tensorboard=writer).record()
        found = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"loss", "token_cosine block/layer 02"} <= set(found)
    assert len(list(tmp_path.glob("events*"))) == 1


def test_a_missing_tensorboard_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(MissingExtraError, match=r"acutance\[monitor\]"):
        ac.Monitor(build(), probe(), tensorboard=tmp_path)


def test_frame_has_a_row_per_step_and_reading(tmp_path):
    monitor = recorded(tmp_path / "monitor.jsonl", [0, 5], metrics=["token_cosine", "norm_spread"])
    frame = monitor.history.to_frame()
    assert len(frame) == 2 * 2 * 3
    row = frame[(frame.step == 5) & (frame.layer == 2) & (frame.metric == "norm_spread")]
    assert row["mean"].item() == monitor.history[5]["norm_spread"][2]
    assert History().to_frame().empty


def test_picture_draws_every_layer_over_the_steps():
    model = build(depth=3)
    monitor = ac.Monitor(model, probe(), metrics=["token_cosine", "attention_entropy"], tap=["block", "attention"])
    for step in (0, 10, 20):
        monitor.record(step)
        with torch.no_grad():
            model.vit.blocks[0].mlp.fc2.bias += 1
    axes = {axis.get_title(): axis for axis in monitor.plot().axes}
    assert {"token_cosine (block)", "token_cosine (attention)", "attention_entropy (attention_matrix)"} < set(axes)
    lines = axes["token_cosine (block)"].get_lines()
    assert len(lines) == 4
    assert len({line.get_color() for line in lines}) == 4
    last = [monitor.history[step]["token_cosine", "block"][3] for step in (0, 10, 20)]
    np.testing.assert_array_equal(lines[3].get_xdata(), [0, 10, 20])
    np.testing.assert_array_equal(lines[3].get_ydata(), last)


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(AcutanceError, match="nothing was recorded"):
        History().plot()
