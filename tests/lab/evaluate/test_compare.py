"""Groups of runs, made of records alone: nothing is trained."""

import json

import numpy as np
import pytest
from run_records import record
from typer.testing import CliRunner

from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.evaluate import compare
from acutance.lab.train import Run


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


def test_a_split_that_does_not_exist_is_named(six):
    with pytest.raises(AcutanceError, match="no split 'tset'; there are train, val, test"):
        compare(six, split="tset")


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


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"scores": {"top1": 1.0}}, {}, "acutance evaluate .*second --split test"),
        ({"scores": {"top1": 1.0}}, {"scores": {"top1": 1.0}}, "seed 0 comes twice"),
        (
            {"scores": {"perplexity": 1.0}, "recipe": "wikitext2"},
            {"scores": {"perplexity": 1.0}, "recipe": "wikitext2", "settings": ("task.test_stride=4",)},
            r"no scores .* in the same way .*first: last weights, task.corpus=wikitext-2, task.length=128, "
            r"task.test_stride=1, float32; .*second: last weights, task.corpus=wikitext-2, task.length=128, "
            r"task.test_stride=4, float32\): evaluate them with the same options",
        ),
        ({"scores": {"top1": 1.0}}, {"scores": {"top1": 1.0}, "weights": "best"}, "no scores .*second: best weights"),
        ({"scores": {"top1": 1.0}}, {"scores": {"top1": 1.0}, "recipe": "wikitext2"}, "different tasks"),
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
    assert "Scores on test: last weights, task.dataset=digits, float32." in done.output
    assert (tmp_path / "table.md").read_text().startswith("| configuration |")
    body = json.loads((tmp_path / "table.json").read_text())
    assert body["groups"][1]["scores"] == {"0": 91.0, "1": 93.0, "2": 92.5}
    assert body["groups"][1]["against_first"]["p"] == 0.25
    assert (body["weights"], body["settings"], body["precision"]) == ("last", ["task.dataset=digits"], "float32")
    assert body["groups"][0]["ema"] == 0.98


def test_the_held_out_slice_is_no_score_of_a_run_that_was_trained_on_it(tmp_path):
    seen = record(tmp_path / "a", "task.train_on=all", scores={"top1": 99.0}, split="val")
    with pytest.raises(AcutanceError, match="was trained on all of its training set"):
        compare([seen], split="val")


def test_of_several_ways_the_plain_one_is_taken_unless_another_is_asked_for(tmp_path):
    changed = ("task.test_stride=4",)
    for name, offset in (("a", 0.0), ("b", 10.0)):
        seed = f"loop.seed={int(offset)}"
        for score, options in enumerate(({}, {"weights": "best"}, {"weights": "best", "settings": changed}), start=1):
            record(tmp_path / name, seed, recipe="wikitext2", scores={"perplexity": score + offset}, **options)
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


def strides(tmp_path, **runs):
    """Runs of a language model, each with a stride of its own and, perhaps, one it was evaluated with."""
    found = []
    for seed, (name, (own, changed)) in enumerate(runs.items()):
        settings = () if changed is None else (f"task.test_stride={changed}",)
        words = {"scores": {"perplexity": 10.0 + seed}, "settings": settings, "recipe": "wikitext2"}
        found.append(record(tmp_path / name, f"loop.seed={seed}", f"task.test_stride={own}", **words))
    return found


def test_what_was_read_alike_is_compared_however_that_came_about(tmp_path):
    """Wherever the stride was set: with the run, or with its evaluation."""
    runs = strides(tmp_path, a=(1, 64), b=(64, None))
    for settings in (None, ("task.test_stride=64",)):
        found = compare(runs, settings=settings)
        assert found.settings.fields == ("task.corpus=wikitext-2", "task.length=128", "task.test_stride=64")
        assert [group.scores for group in found.groups] == [{0: 10.0, 1: 11.0}]  # which trained alike, and are one row


def test_what_was_read_in_different_ways_is_not_compared_though_nothing_was_changed(tmp_path):
    runs = strides(tmp_path, a=(1, None), b=(64, None))
    with pytest.raises(AcutanceError, match=r"no scores .*task.test_stride=1, .*task.test_stride=64, "):
        compare(runs)


def test_settings_that_go_only_together_with_those_of_another_split_are_read_again(tmp_path):
    """A window of 64 words needs strides of at most 64; that of the validation text is not the test's, nor named."""
    words = {"scores": {"perplexity": 9.0}, "settings": ("task.length=64",), "recipe": "wikitext2"}
    found = compare([record(tmp_path / "a", **words)])
    assert found.settings.fields == ("task.corpus=wikitext-2", "task.length=64", "task.test_stride=1")
    assert compare([tmp_path / "a"], settings=("task.length=64", "task.val_stride=64")).settings == found.settings


def test_settings_without_effect_choose_nothing(tmp_path):
    with pytest.raises(AcutanceError, match=r"cannot change optim\.lr"):
        compare(strides(tmp_path, a=(1, None)), settings=("optim.lr=1",))


def test_an_evaluation_of_an_earlier_version_is_not_passed_over_in_silence(tmp_path):
    run = record(tmp_path / "run")
    (run / "evaluation-test.json").write_text("{}")
    advice = "evaluation-test.json was written by an earlier version, evaluate again with acutance evaluate .*run"
    with pytest.raises(AcutanceError, match=advice):
        compare([run])


def test_scores_of_one_way_only_are_taken_whichever_it_is(tmp_path):
    record(tmp_path / "a", scores={"top1": 1.0}, weights="best")
    found = compare([tmp_path / "a"])
    assert (found.settings.weights, found.groups[0].mean) == ("best", 1.0)
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
