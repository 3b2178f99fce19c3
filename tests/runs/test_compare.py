"""Groups of runs, made of records alone: nothing is trained."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from acutance import recipes
from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.runs import Evaluation, compare
from acutance.train import Run, override


def record(folder, *changes, scores=None, settings=(), split="test", recipe="digits", weights="last", trained=None):
    run = Run(folder)
    if not run.exists():
        run.begin(override(recipes.load(recipe), changes), recipe, 1)
        run.write_result({"step": 1, "scores": trained or {}, "headline": "top1", "best": None})
    if scores is not None:
        Evaluation(
            split=split,
            weights=weights,
            settings=settings,
            scores=scores,
            headline="top1",
            higher_is_better=True,
            model="",
            precision="float32",
            command=(),
            evaluated="",
            versions={},
            hardware={},
            git=None,
        ).save(folder)
    return folder


@pytest.fixture
def six(tmp_path):
    plain, steered = (90.0, 91.0, 92.0), (91.0, 93.0, 92.5)
    return [
        record(tmp_path / f"{name}-{seed}", f"loop.seed={seed}", *more, scores={"top1": score, "loss": 1.0})
        for name, scores, more in (("plain", plain, ()), ("steered", steered, ("task.model.mitigation=neutreno:0.6",)))
        for seed, score in enumerate(scores)
    ]


def test_runs_are_grouped_by_all_but_the_seed(six):
    found = compare(six)
    assert [group.label for group in found.groups] == ["mitigation none", "mitigation neutreno:0.6"]
    plain, steered = found.groups
    assert plain.scores == {0: 90.0, 1: 91.0, 2: 92.0}
    assert (plain.mean, plain.spread) == (91.0, 1.0)
    test = found.against_first(steered)
    assert (test.pairs, test.p) == (3, 0.25)
    assert test.mean == pytest.approx(np.mean([1.0, 2.0, 0.5]))
    assert found.against_first(plain) is None


def test_only_shared_seeds_are_paired(six):
    found = compare([six[0], *six[4:]])
    assert found.against_first(found.groups[1]) is None
    found = compare([six[1], *six[3:5]])
    assert found.against_first(found.groups[1]).pairs == 1


def test_where_the_data_lies_makes_no_other_group(tmp_path):
    runs = [
        record(tmp_path / "a", "task.data_dir=/here", "loop.log_every=7", scores={"top1": 1.0}),
        record(tmp_path / "b", "loop.seed=1", scores={"top1": 2.0}),
    ]
    assert len(compare(runs).groups) == 1


def test_a_start_from_other_weights_makes_another_group_but_not_which_seed_they_are_of(tmp_path):
    runs = [
        record(tmp_path / "scratch", scores={"top1": 1.0}),
        record(tmp_path / "a", "task.weights=seed0.safetensors", scores={"top1": 1.0}),
        record(tmp_path / "b", "loop.seed=1", "task.weights=seed1.safetensors", scores={"top1": 2.0}),
    ]
    assert [len(group.scores) for group in compare(runs).groups] == [1, 2]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"scores": {"top1": 1.0}}, {}, "acutance evaluate .*second --split test"),
        ({"scores": {"top1": 1.0}}, {"scores": {"top1": 1.0}}, "seed 0 comes twice"),
        (
            {"scores": {"top1": 1.0}},
            {"scores": {"top1": 1.0}, "settings": ("task.fraction=0.5",)},
            r"no scores .* in the same way .*first: last weights, nothing changed, float32; .*second: last weights, "
            r"task.fraction=0.5, float32\): evaluate them with the same options",
        ),
        ({"scores": {"top1": 1.0}}, {"scores": {"top1": 1.0}, "weights": "best"}, "no scores .*second: best weights"),
        ({"scores": {"top1": 1.0}}, {"scores": {"top1": 1.0}, "recipe": "ptb"}, "different tasks"),
        ({"scores": {"other": 1.0}}, {"scores": {"top1": 1.0}}, "has no 'top1'; it has other"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, first, second, message):
    runs = [record(tmp_path / "first", **first), record(tmp_path / "second", **second)]
    with pytest.raises(AcutanceError, match=message):
        compare(runs)


def test_the_command_writes_markdown_and_json(six, tmp_path):
    files = ["--markdown", tmp_path / "table.md", "--json", tmp_path / "table.json"]
    done = CliRunner().invoke(app, ["compare", *map(str, [*six, *files])])
    assert done.exit_code == 0, done.output
    row = "| mitigation neutreno:0.6 | last, running mean 0.98 | 3 | 92.17 ± 1.04 | +1.17 ± 0.76 | 0.25 (the least"
    assert row in done.output
    assert "Scores on test: last weights, nothing changed, float32." in done.output
    assert (tmp_path / "table.md").read_text().startswith("| configuration |")
    body = json.loads((tmp_path / "table.json").read_text())
    assert body["groups"][1]["scores"] == {"0": 91.0, "1": 93.0, "2": 92.5}
    assert body["groups"][1]["against_first"]["p"] == 0.25
    assert (body["weights"], body["settings"], body["precision"]) == ("last", [], "float32")
    assert body["groups"][0]["ema"] == 0.98


def test_the_held_out_slice_is_no_score_of_a_run_that_was_trained_on_it(tmp_path):
    seen = record(tmp_path / "a", "task.train_on=all", scores={"top1": 99.0}, split="val")
    with pytest.raises(AcutanceError, match="was trained on all of its training set"):
        compare([seen], split="val")


def test_of_several_ways_the_plain_one_is_taken_unless_another_is_asked_for(tmp_path):
    changed = ("task.fraction=0.5",)
    for name, offset in (("a", 0.0), ("b", 10.0)):
        seed = f"loop.seed={int(offset)}"
        record(tmp_path / name, seed, scores={"top1": 1.0 + offset})
        record(tmp_path / name, seed, scores={"top1": 2.0 + offset}, weights="best")
        record(tmp_path / name, seed, scores={"top1": 3.0 + offset}, weights="best", settings=changed)
    runs = [tmp_path / "a", tmp_path / "b"]
    assert len(list(runs[0].glob("evaluation-*.json"))) == 3
    assert compare(runs).groups[0].mean == 6.0
    assert compare(runs, weights="best", settings=()).groups[0].mean == 7.0
    assert compare(runs, settings=changed).groups[0].mean == 8.0
    with pytest.raises(AcutanceError, match=r"several sets of scores .* choose one with --weights and --set"):
        compare(runs, weights="best")
    with pytest.raises(AcutanceError, match="no scores"):
        compare(runs, weights="last", settings=changed)
    with pytest.raises(AcutanceError, match="weights are last or best, not 'worst'"):
        compare(runs, weights="worst")


def test_scores_of_one_way_only_are_taken_whichever_it_is(tmp_path):
    record(tmp_path / "a", scores={"top1": 1.0}, weights="best")
    found = compare([tmp_path / "a"])
    assert (found.way.weights, found.groups[0].mean) == ("best", 1.0)
    assert "| best, running mean 0.98 |" in found.to_markdown()


def test_what_training_found_is_not_mixed_with_what_was_evaluated_afterwards(tmp_path):
    record(tmp_path / "a", trained={"top1": 1.0})
    record(tmp_path / "b", "loop.seed=1", trained={"top1": 2.0}, scores={"top1": 9.0}, split="val")
    found = compare([tmp_path / "a", tmp_path / "b"], split="val")
    assert found.groups[0].scores == {0: 1.0, 1: 2.0}
    assert "fp32 in training" in found.to_markdown()
    assert compare([tmp_path / "b"], split="val").groups[0].scores == {1: 9.0}
    record(tmp_path / "c", "loop.precision=bf16", trained={"top1": 3.0})
    with pytest.raises(AcutanceError, match=r"no scores .*fp32 in training.*bf16 in training"):
        compare([tmp_path / "a", tmp_path / "c"], split="val")


def test_a_run_that_went_on_must_be_evaluated_again(tmp_path):
    run = record(tmp_path / "a", scores={"top1": 1.0})
    (run / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(AcutanceError, match="a went on after it was evaluated: evaluate it again"):
        compare([run])


def test_an_unfinished_run_is_called_so(tmp_path):
    Run(tmp_path).begin(recipes.load("digits"), "digits", 1)
    with pytest.raises(AcutanceError, match=r"not finished\. To go on: acutance train"):
        compare([tmp_path])
