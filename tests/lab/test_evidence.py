"""What pages and recipes publish of trained models is what the records in docs/evidence hold."""

import csv
import json
import statistics
from pathlib import Path

import pytest

from acutance.lab.recipes import RECIPES
from acutance.lab.robustness import CORRUPTIONS, SEVERITIES, RobustnessTable
from acutance.measure.profile import Profile

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
MODELS = {"plain": "cifar100-plain", "neutreno": "cifar100-neutreno"}
LABELS = {"plain": "plain", "neutreno": "NeuTRENO"}
BATCHES = {"cifar100": "", "cifar100-batch1024": ", 1024"}  # evidence and what its rows are called beside the model


def words(*path: str) -> str:
    """A page as one line."""
    return " ".join((ROOT.joinpath(*path)).read_text().split())


def docstring(recipe: str) -> str:
    return " ".join((RECIPES[recipe].__doc__ or "").split())


def groups(name: str) -> list[dict]:
    """The plain runs of a comparison, then those with NeuTRENO."""
    found = json.loads((EVIDENCE / name / "comparison.json").read_text())["groups"]
    assert [group["label"].startswith("mitigation neutreno") for group in found] == [False, True]
    return found


def with_spread(found: dict) -> str:
    return f"{found['mean']:.2f} ± {found['spread']:.2f}"


def rows_of(*path: str) -> list[dict]:
    with EVIDENCE.joinpath(*path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def times_of(evidence: str) -> dict[str, list[dict]]:
    """Rows of a table of times by model, one for each seed."""
    rows = rows_of(evidence, "time.csv")
    return {name: [row for row in rows if row["run"].startswith(prefix)] for name, prefix in MODELS.items()}


@pytest.mark.parametrize("evidence", BATCHES)
def test_the_table_of_cifar100(evidence):
    runs = json.loads((EVIDENCE / evidence / "runs.json").read_text())
    for (name, rows), group in zip(times_of(evidence).items(), groups(evidence), strict=True):
        assert len(rows) == 3
        beside = group["against_first"]
        cells = [
            LABELS[name] + BATCHES[evidence],
            with_spread(group),
            f"+{with_spread(beside)}" if beside else "",
            ", ".join(f"{int(row['median_speed']):,}" for row in rows),
            ", ".join(row["seconds"] for row in rows),
            ", ".join(f"{runs[row['run']]['seconds']['step 50']:.1f}" for row in rows),
        ]
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in words("docs", "train.md")


def test_scores_are_those_of_the_evaluations():
    for data in (*BATCHES, "wikitext2", "camvid"):
        runs = json.loads((EVIDENCE / data / "runs.json").read_text())
        for group in groups(data):
            for seed, place in group["runs"].items():
                kept = runs[Path(place).name]
                scores = kept["evaluation"]["scores"]
                assert group["scores"][seed] == scores[kept["evaluation"]["headline"]]
                assert kept["run"]["config"]["loop"]["seed"] == int(seed)


def test_batches_of_1024_were_chosen_and_run_as_the_page_says():
    page = words("docs", "train.md")
    held_out = {
        row["run"].removeprefix("held-"): row["held_out_top1"] for row in rows_of("cifar100-batch1024", "held-out.csv")
    }
    best = max((choice for choice in held_out if choice.startswith("1024")), key=lambda choice: float(held_out[choice]))
    assert best == "1024-2e-3"
    for choice, score in held_out.items():
        assert f"{score} %" in page
        assert f'"{choice.replace("-", " ", 1)}"' in page
    for kept in json.loads((EVIDENCE / "cifar100-batch1024" / "runs.json").read_text()).values():
        config = kept["run"]["config"]
        assert (config["loop"]["batch_size"], config["optim"]["lr"], config["task"]["train_on"]) == (1024, 2e-3, "all")
    for group in groups("cifar100-batch1024"):
        for other in ("docs/bench.md", "docs/log.md"):
            assert with_spread(group) in words(other)


def test_the_log_repeats_the_scores_of_cifar100():
    for group in groups("cifar100"):
        assert f"{group['mean']:.2f} ± {group['spread']:.2f}" in words("docs/log.md")


def test_what_recipes_promise():
    times = times_of("cifar100")
    plain, steered = groups("cifar100")
    promise = docstring("cifar100")
    assert f"Expect {with_spread(plain)} % top-1" in promise
    assert f"NeuTRENO (λ̃ = 0.6) {with_spread(steered)} %" in promise
    seconds = {name: [round(float(row["seconds"])) for row in rows] for name, rows in times.items()}
    speed = {name: statistics.median(int(row["median_speed"]) for row in rows) for name, rows in times.items()}
    first, *later = seconds["plain"]
    assert f"Time: {max(later)} s of the loop on one H200 (torch 2.11.0) at {speed['plain']:,} images/s" in promise
    assert f"with NeuTRENO {seconds['neutreno'][1]} to {seconds['neutreno'][2]} s at {speed['neutreno']:,}" in promise
    assert f"took {first} s" in promise
    plain, steered = groups("wikitext2")
    for text in (docstring("wikitext2"), words("docs", "language.md")):
        assert f"{plain['mean']:.2f}" in text
        assert f"{steered['mean']:.2f}" in text


def test_what_is_published_of_camvid():
    pair = groups("camvid")
    kept = json.loads((EVIDENCE / "camvid" / "runs.json").read_text())
    runs = [kept[Path(group["runs"]["0"]).name] for group in pair]
    page, log, promise = words("docs", "segmentation.md"), words("docs", "log.md"), docstring("camvid")
    for label, group, run in zip(("plain", "NeuTRENO, λ̃ = 0.6"), pair, runs, strict=True):
        assert f"| {label} | {group['mean']:.2f} | {run['result']['scores']['miou']:.2f} |" in page
    first, second = (f"{group['mean']:.2f}" for group in pair)
    assert f"test mIoU of {first}, with NeuTRENO (λ̃ = 0.6) {second}," in promise
    assert f"a difference of {pair[1]['against_first']['mean']:.2f} points" in page
    first, second = (f"{run['seconds']['step 2200']:.0f} s" for run in runs)
    assert f"{first} of the loop and with NeuTRENO {second}" in log
    assert f"Time: {first} of the loop" in promise
    assert f"with NeuTRENO {second}" in promise
    first, second = (f"{run['seconds']['step 50']:.0f}" for run in runs)
    assert f"{first} and {second} s of them to step 50" in log
    first, second = (f"{run['images/s']['step 100']:.0f}" for run in runs)
    (last,) = {f"{run['images/s']['step 2200']:.0f}" for run in runs}
    assert f"From {first} and {second} images/s before step 100 they rose to {last} each" in log


def test_camvid_was_run_as_its_page_says():
    runs = json.loads((EVIDENCE / "camvid" / "runs.json").read_text())
    page, promise = words("docs", "segmentation.md"), docstring("camvid")
    for name, kept in runs.items():
        (session,) = kept["run"]["sessions"]
        changes = [f"--set {word}" for word in session["command"] if "=" in word]
        assert f'WHAT="{" ".join(changes[:4])}"' in page
        assert " ".join(["acutance train camvid --data-dir data --out", f"runs/{name} $WHAT", *changes[4:]]) in page
        assert " ".join(kept["evaluation"]["command"]) in page
        assert all(change in promise for change in changes[:2])
        assert kept["run"]["config"]["task"]["encoder_weights"] is None


def test_the_trained_pair_by_layer():
    profiles = [Profile.load(EVIDENCE / "cifar100" / f"measure-{name}.json") for name in MODELS]
    metrics = {
        "token cosine": "token_cosine",
        "HFC/LFC (Frobenius)": "hfc_lfc_frobenius",
        "rank residual": "rank_residual",
    }
    for label, metric in metrics.items():
        for place, tap in {"stream": "block", "attention branch": "attention"}.items():
            cells = []
            for profile in profiles:
                by_layer = {reading.layer: reading.mean for reading in profile.select(metric, tap)}
                cells.append(", ".join(f"{by_layer[layer]:.3f}" for layer in (1, 6, 12)))
            assert f"| {label}, {place} | {' | '.join(cells)} |" in words("docs", "measure.md")


@pytest.mark.parametrize(
    ("model", "metric", "layer", "step"),
    [
        *(("plain", metric, 12, step) for metric in ("hfc_lfc_frobenius", "token_cosine") for step in (0, 9700)),
        *(("plain", "hfc_lfc_frobenius", 6, step) for step in (0, 9700)),
        ("neutreno", "hfc_lfc_frobenius", 12, 0),
        ("neutreno", "hfc_lfc_frobenius", 12, 9700),
        ("neutreno", "token_cosine", 12, 9700),
    ],
)
def test_the_course_of_training(model, metric, layer, step):
    (row,) = [
        row
        for row in rows_of("cifar100", "monitor.csv")
        if (row["model"], row["metric"], row["layer"], row["step"]) == (model, metric, str(layer), str(step))
    ]
    assert f"{float(row['mean']):.2f} ± {float(row['std']):.2f}" in words("docs", "monitor.md")


def test_robustness_of_the_trained_pair():
    def tables(ending: str) -> list[RobustnessTable]:
        return [RobustnessTable.load(EVIDENCE / "robustness" / f"cifar100-{name}{ending}.json") for name in MODELS]

    def line(label: str, plain: float, steered: float) -> str:
        return f"| {label} | {plain:.2f} | {steered:.2f} | {steered - plain:+.2f} |".replace("-", "−")

    page, some, all_images = words("docs", "robustness.md"), tables(""), tables("-h200")
    assert [table.context["images"] for table in some + all_images] == [1000, 1000, 10_000, 10_000]
    assert line("1,000 test images, clean", *(table["clean"] for table in some)) in page
    assert line("… mean of 19 corruptions at 5 severities", *(table.mean() for table in some)) in page
    assert line("… `fgsm:1`", *(table["fgsm:1"] for table in some)) in page
    assert line("… `pgd:1`, 20 steps", *(table["pgd:1:20:0.125"] for table in some)) in page
    assert line("10,000 test images, clean", *(table["clean"] for table in all_images)) in page
    ten = list(CORRUPTIONS)[:10]
    means = (statistics.mean(table[f"{name}:{level}"] for name in ten for level in SEVERITIES) for table in all_images)
    assert line("… mean of the first 10 corruptions at 5 severities", *means) in page
