"""What a queue holds: keys that last, results that accumulate, what is started, and the tables."""

import json
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console
from scipy import stats
from toy_queue import TOY, write

from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.evaluate import statistics
from acutance.lab.queue.jobs import NEUTRAL, Job, Queue, Row, digest_of
from acutance.lab.queue.results import FORMAT, Results, beside, expected_seconds
from acutance.lab.queue.run import Scheduler, Session, duration
from acutance.lab.queue.tables import verdict, write_tables
from acutance.lab.train.config import incidental_fields

FILE = Path(__file__).parents[3] / "docs/evidence/queue/queue.toml"


@pytest.fixture
def queue(tmp_path):
    return Queue.load(write(tmp_path))


def line(job, top1, **more):
    """What a run leaves, but for what was read from its weights."""
    taps = {"block": ["token_cosine", "hfc_lfc_frobenius"], "attention": ["token_cosine"]}
    layers = {tap: {name: {"1": 0.5, "2": 0.6} for name in names} for tap, names in taps.items()}
    layers["attention_matrix"] = {"attention_cosine": {"2": 0.9}}
    shares = {norm: {"negative_share": [0.25, 0.75]} for norm in ("ignore", "fold")}
    found = {"split": "val" if job.block.kind == "tune" else "test", "headline": "top1", "parameters": 1234}
    found |= {"scores": {"top1": top1, "loss": 2.0}, "images_seen": 5678, "layers": layers, "spectra": shares}
    found |= {"step_ms": 1.5, "seconds": 20.0, "memory_mib": None, "workers": 1, "machine": "CPU", "sessions": 1}
    return {**found, "git": {"commit": "0123456789abcdef", "changed": False}, **more}


def test_keys_outlast_refactorings():
    """A result is found by its key. If one of these changes, all results are orphans: make the change neutral."""
    jobs = {job.label: job.key for job in Queue.load(FILE).jobs()}
    assert jobs["first-fruits: plain, seed 101"] == "002da3d645f486c9"
    assert jobs["first-depth: 48 layers, seed 102"] == "14812d6ab8880a10"
    assert jobs["deit-rates: ViT-Ti, rate 5e-4, seed 101"] == "99b0d9542e31064a"


def test_a_key_says_all_that_defines_a_run_and_nothing_else(queue):
    job = queue.jobs()[0]

    def key(*changes, kind="tune", seed=101):
        return Job(replace(job.block, kind=kind), Row("other", changes), seed).key

    assert key() == job.key == digest_of(json.loads(json.dumps(job.definition)))
    assert key("loop.compile=true", "loop.evaluate_every=3", "task.data_dir=/data", "optim.momentum=0.9") == job.key
    others = {key(kind="final"), key(seed=102), key("optim.lr=1e-3"), key("task.model.layer_scale=0.1"), job.key}
    assert len(others) == 5


def test_every_optional_field_has_a_neutral_value():
    """A field without one would change all keys when it is added."""

    def words(config, prefix=""):
        for field in fields(config):
            value, name = getattr(config, field.name), prefix + field.name
            yield from words(value, f"{name}.") if is_dataclass(value) else [(name, value)]

    config = recipes.load("cifar100")
    always = {"dataset", "image_size", "patch_size", "dim", "depth", "heads", "num_classes", "epochs", "batch_size"}
    always |= {"seed", "lr", "weight_decay", "name"}
    named = {name for name, _ in words(config)} - incidental_fields(config)
    lacking = {name for name in named if not any(word.startswith(f"{name}=") for word in NEUTRAL)}
    assert {name.rpartition(".")[2] for name in lacking} == always


def test_jobs_go_seed_by_seed_and_what_cannot_be_meant_is_refused(tmp_path, queue):
    labels = [f"{row}, seed {seed}" for seed in (101, 102) for row in ("plain", "eigen −")]
    assert [job.label for job in queue.jobs()] == [f"toy: {label}" for label in labels] + ["toy-final: plain, seed 1"]
    held = {job.config.task.train_on for job in queue.jobs()[:4]}, queue.jobs()[4].config.task.train_on
    assert held == ({"train"}, "all")
    for old, new, message in (
        ("queue/1", "queue/9", "this version reads"),
        ("seeds = [1]", "seeds = [101]", "tunes on seed 101, which toy-final tests"),
        ('name = "toy-final"', 'name = "toy"', "two blocks are called 'toy'"),
        ("seconds = 1000", "secnds = 1", r"has no field 'secnds', did you mean seconds"),
        ('"optim.name=muon"]', '"optim.name=muon"]}, {label = "again"', "'plain' and 'again', which are the same run"),
        ("format", "format =", "is not a TOML file"),
    ):
        with pytest.raises(AcutanceError, match=message):
            Queue.load(write(tmp_path, TOY.replace(old, new, 1)))


def test_results_are_appended_whole_and_once(tmp_path, queue):
    results, (one, other, *_) = Results(tmp_path / "results.jsonl"), queue.jobs()
    assert results.read() == {}
    results.append(one, line(one, 50.0))
    with results.path.open("ab") as file:
        file.write(b'{"format": "acutance-queue-result/1", "key": "cut o')  # by a crash
    assert list(results.read()) == [one.key]
    results.append(other, line(other, float("nan")))
    assert list(results.read()) == [one.key, other.key]
    assert results.read()[other.key]["scores"]["top1"] is None
    with pytest.raises(AcutanceError, match="has a result of toy: plain, seed 101 already"):
        results.append(one, line(one, 51.0))
    merged = json.dumps({"format": FORMAT, "key": one.key, "scores": "of another machine"})
    results.path.write_text(results.path.read_text() + merged + "\n")
    assert results.read()[one.key]["scores"]["top1"] == 50.0
    results.path.write_text("{}\n")
    with pytest.raises(AcutanceError, match="line 1, has the format None"):
        results.read()


def test_only_what_fits_is_started_by_earlier_runs_or_by_the_file(tmp_path, queue):
    results, (one, _, later, *_, final) = Results(tmp_path / "results.jsonl"), queue.jobs()
    assert expected_seconds(later, {}, 1, "CPU") == 10
    assert expected_seconds(later, {}, 4, "CPU") == 10 * beside(4) == 25
    results.append(one, line(one, 50.0, seconds=60.0, workers=2))
    assert expected_seconds(later, results.read(), 2, "CPU") == 60
    assert expected_seconds(later, results.read(), 2, "H200") == 10 * beside(2)
    session = Session(write(tmp_path), tmp_path, results, trial=True)

    def first(seconds):
        found = Scheduler(session, time.monotonic() + seconds, Console())._next()
        return found and found.label

    assert first(5) is None
    assert first(20) == "toy: eigen −, seed 101"  # the plain one of this seed is done, that of the next takes 45 s
    results.append(queue.jobs()[1], line(one, 50.0, seconds=100.0))
    assert first(42) == "toy: plain, seed 102"
    assert first(35) is None
    assert expected_seconds(final, results.read(), 1, "CPU") == 1000
    assert [duration(text) for text in ("9m", "540s", "1.5h")] == [540, 540, 5400]
    with pytest.raises(AcutanceError, match="a time is written 9m"):
        duration("9")


def test_tables_pair_seeds_and_keep_choices_and_results_apart(tmp_path, queue):
    results, jobs = Results(tmp_path / "results.jsonl"), queue.jobs()
    for job, top1, sessions in zip(jobs[:3], (50.0, 53.0, 51.0), (1, 1, 2), strict=True):
        results.append(job, line(job, top1, sessions=sessions, seconds=20 / sessions))
    results.append(jobs[3], {"diverged": "the loss became nan", "seconds": 3.0})
    pages = {path.name: path.read_text() for path in write_tables(tmp_path / "queue.toml", results)}
    assert "| plain | 2 | 50.50 [44.15, 56.85] | 2.000 |" in pages["toy.md"]
    assert "| eigen − | 1 | 53.00 | 2.000 | +3.00 | – | – | 1 | not separated |" in pages["toy.md"]
    assert "- eigen −: diverged with seed 102\n" in pages["toy.md"]
    assert "| plain | 1,234 | 5,678 | 1.5 | 20.0 | 1 | – | CPU | 0123456789 |" in pages["toy.md"]
    assert "| [A toy](toy.md) | tune | 2 | 2 | 4 of 4 |" in pages["README.md"]
    assert "No run is done yet." in pages["toy-final.md"]
    # A line that says it is a final one, but read the held-out slice; and one whose key is of another run.
    results.append(jobs[4], line(jobs[4], 99.0, split="val"))
    write_tables(tmp_path / "queue.toml", results)
    assert "99.0" not in (tmp_path / "toy-final.md").read_text()
    results.path.write_text(results.path.read_text().replace('"loop.seed": 101', '"loop.seed": 7'))
    with pytest.raises(AcutanceError, match="is not of the run that its key names"):
        write_tables(tmp_path / "queue.toml", results)


def test_the_committed_tables_are_those_of_the_committed_results(tmp_path):
    for name in ("queue.toml", "results.jsonl"):
        (tmp_path / name).write_bytes((FILE.parent / name).read_bytes())
    made = write_tables(tmp_path / "queue.toml", Results(tmp_path / "results.jsonl"))
    assert {path.name for path in FILE.parent.glob("*.md")} == {path.name for path in made}
    for path in made:
        assert path.read_text() == (FILE.parent / path.name).read_text(), "acutance reproduce --queue … --tables"


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11])
def test_students_t_is_scipys(freedom):
    values = [0.3, 1.2, -0.4, 0.9, 2.0, 0.1, 0.8, 1.1, 0.2, 0.5, 0.6, 0.7][: freedom + 1]
    assert statistics.paired_t(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_holm_corrects_for_the_table_and_small_differences_are_not_separated():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
    assert statistics.paired_t([1.0]) is None
    assert (statistics.paired_t([0.0, 0.0]), statistics.paired_t([1.0, 1.0])) == (1.0, 0.0)
    cases = [(0.4, 1e-9, 1), (2.0, 0.2, 1), (2.0, None, 1), (2.0, 0.01, 1), (2.0, 0.01, -1)]
    found = [verdict([mean], p, better) for mean, p, better in cases]
    assert found == ["not separated"] * 3 + ["better", "worse"]
