"""Robustness of several runs: tables made by hand, so that every number is known."""

import json

import pytest
from run_records import record
from typer.testing import CliRunner

from acutance import models, save
from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.lab.evaluate import compare_robustness, paired
from acutance.lab.robustness import RobustnessTable
from acutance.lab.robustness.evaluate import weights_digest

CONTEXT = {
    "data": "digits", "images": 364, "pixels": "ab", "corruptions": "drawn", "seed": 0, "dtype": "float32",
    "weights": "cd", "split": "test", "which": "last",
}  # fmt: skip
CELLS = {"clean": 90.0, "fog:1": 80.0, "fog:2": 70.0, "snow:1": 60.0, "snow:2": 50.0, "fgsm:1": 40.0}


def measured(folder, *changes, plus=0.0, cells=CELLS, name="robustness.json", **context):
    record(folder, *changes)
    table = RobustnessTable({cell: value + plus for cell, value in cells.items()}, {**CONTEXT, **context})
    table.save(folder / name)
    return folder


@pytest.fixture
def six(tmp_path):
    """Three seeds of two groups: 0, 1, 2 points above CELLS, and 1, 3, 5."""
    plain = [measured(tmp_path / f"plain{s}", f"loop.seed={s}", plus=s) for s in range(3)]
    change = "task.model.mitigation=neutreno:0.6"
    return plain + [measured(tmp_path / f"steered{s}", f"loop.seed={s}", change, plus=2 * s + 1) for s in range(3)]


def test_a_split_that_does_not_exist_is_named(six):
    with pytest.raises(AcutanceError, match="no split 'tset'; there are train, val, test"):
        compare_robustness(six, split="tset")


def test_every_cell_and_mean_has_mean_spread_and_paired_test(six):
    (found,) = compare_robustness(six)
    means = {"clean": 90, "fgsm:1": 40, "snow": 55, "fog": 75, "severity 1": 70, "severity 2": 60}
    means |= {"mean of corruptions": 65, "fog:2": 70, "snow:1": 60}
    for name, value in means.items():
        plain, steered = found.comparisons[name].groups
        assert list(plain.scores.values()) == [value, value + 1, value + 2]
        assert (steered.mean, steered.spread) == (value + 3, 2.0)
        expected = paired(list(plain.scores.values()), list(steered.scores.values()))
        assert found.comparisons[name].against_first(steered) == expected
    lines = found.to_markdown().splitlines()
    first = "mitigation none, seeds: 3"
    assert lines[0] == f"| top-1, % | {first} | mitigation neutreno:0.6, seeds: 3 | beside the first | p |"
    assert [line.split(" | ")[0] for line in lines[2:9]] == [
        "| clean", "| fgsm:1", "| snow", "| fog", "| severity 1", "| severity 2", "| mean of corruptions",
    ]  # fmt: skip
    assert (
        lines[3] == "| fgsm:1 | 41.00 ± 1.00 | 43.00 ± 2.00 | +2.00 ± 1.00 | 0.25 (the least so few pairs can give) |"
    )
    assert "corruptions=drawn" in lines[-1]


def test_one_score_alone(six):
    (found,) = compare_robustness(six, score="fog:2")
    assert list(found.comparisons) == ["fog:2"]
    with pytest.raises(AcutanceError, match="has no 'fog:9'; it has"):
        compare_robustness(six, score="fog:9")


def test_each_way_has_a_table(six):
    for folder in six:
        measured(folder, name="robustness-CIFAR-100-C.json", corruptions="the files in CIFAR-100-C")
        measured(folder, name="robustness-val.json", split="val", plus=9)
    published, drawn = compare_robustness(six)
    assert "files in CIFAR-100-C" in published.to_markdown()
    assert published.comparisons["clean"].groups[1].mean == 90
    assert drawn.comparisons["clean"].groups[1].mean == 93
    (slice_,) = compare_robustness(six, split="val")
    assert slice_.comparisons["clean"].groups[0].mean == 99


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"pixels": "other"}, "not measured in one common way"),
        ({"seed": 1}, "not measured in one common way"),
        ({"dtype": "bfloat16"}, "not measured in one common way"),
        ({"which": "best"}, "has no robustness on 'test' with the last weights: acutance robustness"),
        ({"cells": {**CELLS, "fog:3": 1.0}}, "plain lacks fog:3"),
        ({"cells": {"clean": 1.0}}, "steered lacks fgsm:1, fog:1"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, second, words):
    plain, steered = measured(tmp_path / "plain"), measured(tmp_path / "steered", "optim.lr=1", **second)
    with pytest.raises(AcutanceError, match=words):
        compare_robustness([plain, steered])


def test_weights_that_went_on_are_told(tmp_path):
    model = models.vit_digits()
    folder = measured(tmp_path / "run", weights=weights_digest(model))
    save(model, folder / "model.safetensors")
    assert compare_robustness([folder])
    measured(folder, weights="before")
    with pytest.raises(AcutanceError, match="went on after its robustness was measured"):
        compare_robustness([folder])


def test_a_slice_that_was_trained_on_is_refused(tmp_path):
    folder = measured(tmp_path / "run", "task.train_on=all", split="val", name="robustness-val.json")
    with pytest.raises(AcutanceError, match="would flatter it"):
        compare_robustness([folder], split="val")
    with pytest.raises(AcutanceError, match="name the runs"):
        compare_robustness([])


def test_the_command_prints_and_writes(six, tmp_path):
    files = ["--markdown", tmp_path / "table.md", "--json", tmp_path / "table.json"]
    done = CliRunner().invoke(app, ["compare", *map(str, [*six, *files]), "--robustness"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "table.md").read_text() in done.output
    (body,) = json.loads((tmp_path / "table.json").read_text())
    assert body["comparisons"]["fog:1"]["groups"][1]["scores"] == {"0": 81.0, "1": 83.0, "2": 85.0}
    refused = CliRunner().invoke(app, ["compare", *map(str, six), "--robustness", "--set", "task.fraction=0.1"])
    assert "takes no --set" in str(refused.exception)
