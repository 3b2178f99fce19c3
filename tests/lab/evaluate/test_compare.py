"""Groups of runs, made of records and tables alone: nothing is trained, and every number is known."""

import json
from itertools import product

import numpy as np
import pytest
import torch

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.evaluate import Evaluation, compare, compare_robustness, paired
from acutance.lab.evaluate.statistics import sign_flip_p
from acutance.lab.robustness import RobustnessTable
from acutance.lab.robustness.evaluate import weights_digest
from acutance.lab.train import Run, override
from acutance.lab.train.start import initial_weights

NEUTRENO = "task.model.mitigation=neutreno:0.6"
EMPTY = {"command": (), "evaluated": "", "versions": {}, "hardware": {}, "git": None}
CONTEXT = {
    "data": "digits", "images": 364, "pixels": "ab", "corruptions": "drawn", "seed": 0, "dtype": "float32",
    "weights": "cd", "split": "test", "which": "last",
}  # fmt: skip
CELLS = {"clean": 90.0, "fog:1": 80.0, "fog:2": 70.0, "snow:1": 60.0, "snow:2": 50.0, "fgsm:1": 40.0}


def record(folder, *changes, scores=None, recipe="digits", trained=None, start=None, **evaluated):
    """A run, and perhaps one more evaluation of it."""
    run = Run(folder)
    if not run.exists():
        config = override(recipes.load(recipe), [*changes, *([] if start is None else [f"task.weights={start}"])])
        run.begin(config, recipe, 1, None if start is None else initial_weights(config.task))
        run.write_result({"step": 1, "scores": trained or {}, "headline": "top1", "best": None})
    if scores is not None:
        evaluated = {"split": "test", "weights": "last", "settings": (), "model": "", **evaluated}
        about = {"headline": "top1", "higher_is_better": True, "precision": "float32", **EMPTY}
        Evaluation(scores=scores, **evaluated, **about).save(folder)
    return folder


def top1(folder, *changes, score=1.0, **options):
    return record(folder, *changes, scores={"top1": score}, **options)


def strides(tmp_path, **runs):
    """Runs of a language model, each with a stride of its own and, perhaps, one it was evaluated with."""
    found = []
    for seed, (name, (own, changed)) in enumerate(runs.items()):
        settings = () if changed is None else (f"task.test_stride={changed}",)
        words = {"scores": {"perplexity": 10.0 + seed}, "settings": settings, "recipe": "wikitext2"}
        found.append(record(tmp_path / name, f"loop.seed={seed}", f"task.test_stride={own}", **words))
    return found


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Three seeds of two groups, evaluated; their robustness is 0, 1, 2 points above CELLS, and 1, 3, 5."""
    folder = tmp_path_factory.mktemp("six")
    groups = {"plain": ((), (90.0, 91.0, 92.0), (0, 1, 2)), "steered": ((NEUTRENO,), (91.0, 93.0, 92.5), (1, 3, 5))}
    return [
        measured(top1(folder / f"{name}-{seed}", f"loop.seed={seed}", *more, score=scores[seed]), plus=above[seed])
        for name, (more, scores, above) in groups.items()
        for seed in range(3)
    ]


def measured(folder, *changes, plus=0.0, cells=CELLS, name="robustness.json", **context):
    record(folder, *changes)
    table = RobustnessTable({cell: value + plus for cell, value in cells.items()}, {**CONTEXT, **context})
    table.save(folder / name)
    return folder


def test_runs_are_grouped_by_all_but_the_seed(six, tmp_path):
    found = compare(six)
    assert [group.label for group in found.groups] == ["mitigation none", "mitigation neutreno:0.6"]
    plain, steered = found.groups
    assert plain.scores == {0: 90.0, 1: 91.0, 2: 92.0}
    assert (plain.mean, plain.spread) == (91.0, 1.0)
    test = steered.against_first
    assert (test.pairs, test.p) == (3, 0.25)
    assert test.mean == pytest.approx(np.mean([1.0, 2.0, 0.5]))
    assert plain.against_first is None
    for runs, pairs in (((six[0], *six[4:]), None), ((six[1], *six[3:5]), 1)):  # only shared seeds are paired
        found = compare(runs)
        assert getattr(found.groups[1].against_first, "pairs", None) == pairs
    here = top1(tmp_path / "a", "task.data_dir=/here", "loop.log_every=7")  # where the data lies makes no other group
    assert len(compare([here, top1(tmp_path / "b", "loop.seed=1")]).groups) == 1


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"scores": None}, "acutance evaluate .*second --split test"),
        ({}, {}, "seed 0 comes twice"),
        ({}, {"weights": "best"}, "no scores .*second: best weights"),
        ({}, {"recipe": "wikitext2"}, "different tasks"),
        ({"scores": {"other": 1.0}}, {}, "has no 'top1'; it has other"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, first, second, message):
    scores = {"scores": {"top1": 1.0}}
    with pytest.raises(AcutanceError, match=message):
        compare([record(tmp_path / "first", **scores | first), record(tmp_path / "second", **scores | second)])


@pytest.mark.parametrize("comparing", [compare, compare_robustness])
def test_what_no_run_can_have_is_named(six, tmp_path, comparing):
    seen = measured(top1(tmp_path / "a", "task.train_on=all", split="val"), split="val", name="robustness-val.json")
    for runs, options, message in (
        (six, {"split": "tset"}, "no split 'tset'; there are train, val, test"),
        (six, {"weights": "worst"}, "last or best, not"),
        ([], {}, "name the runs"),
        ([seen], {"split": "val"}, "was trained on all of its training set"),
    ):
        with pytest.raises(AcutanceError, match=message):
            comparing(runs, **options)


@pytest.mark.parametrize("robustness", [False, True])
def test_the_command_writes_markdown_and_json(six, tmp_path, robustness, command):
    table, body = tmp_path / "table.md", tmp_path / "table.json"
    words = ["compare", *six, "--markdown", table, "--json", body, *["--robustness"] * robustness]
    printed = command(*words)
    assert table.read_text() in printed
    body = json.loads(body.read_text())
    if robustness:
        assert body[0]["comparisons"]["fog:1"]["groups"][1]["scores"] == {"0": 81.0, "1": 83.0, "2": 85.0}
        with pytest.raises(AcutanceError, match="takes no --set"):
            command(*words, "--set", "task.fraction=0.1")
        return
    row = "| mitigation neutreno:0.6 | last, running mean 0.98 | 3 | 92.17 ± 1.04 | +1.17 ± 0.76 | 0.25 (the least"
    assert row in printed
    assert "Scores on test: last weights, task.dataset=digits, float32." in printed
    assert body["groups"][1]["scores"] == {"0": 91.0, "1": 93.0, "2": 92.5}
    assert body["groups"][1]["against_first"]["p"] == 0.25
    assert (body["weights"], body["settings"], body["precision"]) == ("last", ["task.dataset=digits"], "float32")
    assert body["groups"][0]["ema"] == 0.98


def test_of_several_settings_the_plain_ones_are_taken_unless_others_are_asked_for(tmp_path):
    changed, runs = ("task.test_stride=4",), [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs):
        for score, options in enumerate(({}, {"weights": "best"}, {"weights": "best", "settings": changed})):
            record(run, f"loop.seed={seed}", recipe="wikitext2", scores={"perplexity": score + 2 * seed}, **options)
    assert compare(runs).groups[0].mean == 1.0
    assert compare(runs, weights="best", settings=()).groups[0].mean == 2.0
    assert compare(runs, settings=changed).groups[0].mean == 3.0
    with pytest.raises(AcutanceError, match=r"several sets of scores .* choose one with --weights and --set"):
        compare(runs, weights="best")
    with pytest.raises(AcutanceError, match="no scores"):
        compare(runs, weights="last", settings=changed)


def test_what_was_read_alike_is_compared_wherever_the_stride_was_set(tmp_path):
    runs = strides(tmp_path, a=(1, 64), b=(64, None))
    for settings in (None, ("task.test_stride=64",)):
        found = compare(runs, settings=settings)
        assert found.settings.fields == ("task.corpus=wikitext-2", "task.length=128", "task.test_stride=64")
        assert [group.scores for group in found.groups] == [{0: 10.0, 1: 11.0}]  # which trained alike, and are one row
    with pytest.raises(AcutanceError, match=r"cannot change optim\.lr"):
        compare(runs, settings=("optim.lr=1",))
    for name, other in {"own": (64, None), "changed": (1, 4)}.items():
        with pytest.raises(AcutanceError, match=r"no scores .*stride=1, .*stride=(64|4), .*same"):
            compare(strides(tmp_path / name, a=(1, None), b=other))
    # A window of 64 words needs strides of at most 64; that of the validation text is not the test's, nor named.
    words = {"scores": {"perplexity": 9.0}, "settings": ("task.length=64",), "recipe": "wikitext2"}
    found = compare([record(tmp_path / "c", **words)])
    assert found.settings.fields == ("task.corpus=wikitext-2", "task.length=64", "task.test_stride=1")
    assert compare([tmp_path / "c"], settings=("task.length=64", "task.val_stride=64")).settings == found.settings


def test_a_run_without_scores_is_told_how_to_get_them(tmp_path):
    run = record(tmp_path / "run")
    (run / "evaluation-test.json").write_text("{}")
    with pytest.raises(AcutanceError, match=r"earlier version, evaluate again with acutance evaluate .*run"):
        compare([run])
    Run(tmp_path / "begun").begin(recipes.load("digits"), "digits", 1)
    with pytest.raises(AcutanceError, match=r"not finished\. To go on: acutance train"):
        compare([tmp_path / "begun"])
    assert compare([top1(tmp_path / "a", weights="best")]).settings.weights == "best"  # the only ones


def test_what_training_found_is_not_mixed_with_what_was_evaluated_afterwards(tmp_path):
    a, b = record(tmp_path / "a", trained={"top1": 1.0}), tmp_path / "b"
    top1(b, "loop.seed=1", trained={"top1": 2.0}, score=9.0, split="val")
    found = compare([a, b], split="val")
    assert found.groups[0].scores == {0: 1.0, 1: 2.0}
    assert "fp32 in training" in found.to_markdown()
    assert compare([b], split="val").groups[0].scores == {1: 9.0}
    c = record(tmp_path / "c", "loop.precision=bf16", trained={"top1": 3.0})
    with pytest.raises(AcutanceError, match=r"no scores .*fp32 in training.*bf16 in training"):
        compare([a, c], split="val")


def test_a_run_that_went_on_must_be_evaluated_again(tmp_path):
    run, model = top1(tmp_path / "a"), ac.models.vit_digits()
    measured(run, weights=weights_digest(model))
    ac.save(model, run / "model.safetensors")
    with pytest.raises(AcutanceError, match="a was trained further after it was evaluated"):
        compare([run])
    assert compare_robustness([run])
    measured(run, weights="before")
    with pytest.raises(AcutanceError, match="was trained further after its robustness was measured"):
        compare_robustness([run])


def test_every_cell_and_mean_of_robustness_has_mean_spread_and_paired_test(six):
    (found,) = compare_robustness(six)
    means = {"clean": 90, "fgsm:1": 40, "snow": 55, "fog": 75, "severity 1": 70, "severity 2": 60}
    means |= {"mean of corruptions": 65, "fog:2": 70, "snow:1": 60}
    for name, value in means.items():
        plain, steered = found.comparisons[name].groups
        assert list(plain.scores.values()) == [value, value + 1, value + 2]
        assert (steered.mean, steered.spread) == (value + 3, 2.0)
        assert steered.against_first == paired([0, 1, 2], [1, 3, 5])
    lines = found.to_markdown().splitlines()
    first, second = "mitigation none, seeds: 3", "mitigation neutreno:0.6, seeds: 3"
    assert lines[0] == f"| top-1, % | {first} | {second} | beside the first | p |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:9]] == list(means)[:7]
    assert lines[3].startswith("| fgsm:1 | 41.00 ± 1.00 | 43.00 ± 2.00 | +2.00 ± 1.00 | 0.25 (the least")
    assert "corruptions=drawn" in lines[-1]
    assert list(compare_robustness(six, score="fog:2")[0].comparisons) == ["fog:2"]
    with pytest.raises(AcutanceError, match="has no 'fog:9'; it has"):
        compare_robustness(six, score="fog:9")


def test_each_way_to_measure_robustness_has_a_table(tmp_path):
    run = measured(tmp_path / "run", plus=3)
    measured(run, name="robustness-CIFAR-100-C.json", corruptions="the files in CIFAR-100-C")
    measured(run, name="robustness-val.json", split="val", plus=9)
    published, drawn = compare_robustness([run])
    assert "files in CIFAR-100-C" in published.to_markdown()
    (slice_,) = compare_robustness([run], split="val")
    assert [found.comparisons["clean"].groups[0].mean for found in (published, drawn, slice_)] == [90, 93, 99]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        *(({key: "other"}, "not measured in one common way") for key in ("pixels", "seed", "dtype")),
        ({"which": "best"}, "has no robustness on 'test' with the last weights: run acutance robustness"),
        ({"cells": {**CELLS, "fog:3": 1.0}}, "plain lacks fog:3"),
        ({"cells": {"clean": 1.0}}, "steered lacks fgsm:1, fog:1"),
    ],
)
def test_robustness_that_cannot_be_compared_is_said(tmp_path, second, words):
    plain, steered = measured(tmp_path / "plain"), measured(tmp_path / "steered", "optim.lr=1", **second)
    with pytest.raises(AcutanceError, match=words):
        compare_robustness([plain, steered])


def weights(folder, *changes, file="model.safetensors", start=None):
    """A run to start from, and the file of its weights, which no other run has."""
    record(folder, *changes, start=start)
    torch.manual_seed(sum(f"{folder.name}/{file}".encode()))
    return ac.save(ac.models.ViT(**Run(folder).config().task.model.to_dict()), folder / file)


def labels(*runs):
    return [group.label for group in compare(runs).groups]


def test_each_seed_may_start_from_a_seed_of_its_own(tmp_path):
    seeds = {seed: f"loop.seed={seed}" for seed in (0, 1)}
    plain = [top1(tmp_path / f"from-{n}", seed, start=weights(tmp_path / str(n), seed)) for n, seed in seeds.items()]
    steered = top1(tmp_path / "from-steered", "loop.seed=1", start=weights(tmp_path / "steered", NEUTRENO))
    best = top1(tmp_path / "from-best", start=weights(tmp_path / "0", file="best.safetensors"))
    scratch = top1(tmp_path / "scratch")
    groups = compare([*plain, steered, best, scratch]).groups
    assert [list(group.scores) for group in groups] == [[0, 1], [1], [0], [0]]
    assert labels(*plain, steered) == ["weights' mitigation none", "weights' mitigation neutreno:0.6"]
    assert labels(plain[0], best) == ["weights' file model.safetensors", "weights' file best.safetensors"]
    assert labels(plain[0], scratch) == ["weights model.safetensors", "weights none"]
    assert len(set(labels(scratch, plain[0], steered))) == 3  # told apart beside one from scratch, too


def test_a_start_is_known_by_its_own_start_by_its_file_or_by_its_name(tmp_path):
    runs = []
    for name, changes in {"plain": (), "steered": (NEUTRENO,)}.items():
        second = weights(tmp_path / f"{name}-second", start=weights(tmp_path / name, *changes))
        runs.append(top1(tmp_path / f"{name}-third", start=second))
    assert labels(*runs) == ["weights' weights' mitigation none", "weights' weights' mitigation neutreno:0.6"]
    files = [weights(tmp_path / name, file="other.safetensors") for name in "ab"]  # beside a run's own: of no run
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(files[0].read_bytes())
    runs = [top1(tmp_path / f"from-{i}", f"loop.seed={i}", start=file) for i, file in enumerate([*files, copy])]
    assert [list(group.scores) for group in compare(runs).groups] == [[0, 2], [1]]
    runs = [top1(tmp_path / f"not-recorded-{i}", f"loop.seed={i}", f"task.weights={i}.safetensors") for i in range(2)]
    assert labels(*runs) == ["weights 0.safetensors", "weights 1.safetensors"]


# The sign-flip test


@pytest.mark.parametrize("count", range(1, 11))
def test_it_counts_what_brute_force_counts(count):
    random = np.random.default_rng(count)
    signs = np.array(list(product((1, -1), repeat=count)))
    for differences in (random.normal(0.5, 1, count), random.integers(-2, 3, count).astype(float)):
        expected = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
        assert sign_flip_p(differences) == pytest.approx(expected, abs=1e-12)
    test = paired([70.0, 71.0, 72.0], [71.0, 71.5, 72.25])  # three seeds cannot show much
    assert test.p == test.smallest_p == 0.25
    assert sign_flip_p(np.ones(30)) == pytest.approx(2.0**-29)
    for impossible in ([], [float("nan")], np.ones(41)):
        with pytest.raises(AcutanceError, match="1 to 40 finite differences"):
            sign_flip_p(impossible)
