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
LABELS = {"plain": "plain", "neutreno": "NeuTRENO"}
BATCHES = {"cifar100": "", "cifar100-batch1024": ", 1024"}  # evidence and what its rows are called beside the model


def words(place):
    """A page, or a recipe's docstring, as one line."""
    text = (ROOT / place).read_text() if "/" in place else RECIPES[place].__doc__
    return " ".join(text.split())


def runs_of(data):
    return json.loads((EVIDENCE / data / "runs.json").read_text())


def groups(data):
    """The plain runs of a comparison, then those with NeuTRENO."""
    found = json.loads((EVIDENCE / data / "comparison.json").read_text())["groups"]
    assert [group["label"].startswith("mitigation neutreno") for group in found] == [False, True]
    return found


def with_spread(found):
    return f"{found['mean']:.2f} ± {found['spread']:.2f}"


def rows_of(*path):
    with EVIDENCE.joinpath(*path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def said_of_cifar100():
    for data, ending in BATCHES.items():
        for (name, label), group in zip(LABELS.items(), groups(data), strict=True):
            rows = [row for row in rows_of(data, "time.csv") if f"cifar100-{name}" in row["run"]]  # one for each seed
            cells = [
                label + ending,
                with_spread(group),
                f"+{with_spread(group['against_first'])}" if group["against_first"] else "",
                ", ".join(f"{int(row['median_speed']):,}" for row in rows),
                ", ".join(row["seconds"] for row in rows),
                ", ".join(f"{runs_of(data)[row['run']]['seconds']['step 50']:.1f}" for row in rows),
            ]
            yield "docs/train.md", f"| {' | '.join(cells)} |".replace("|  |", "| |")
            yield "docs/log.md", with_spread(group)
    for group in groups("cifar100-batch1024"):
        yield "docs/bench.md", with_spread(group)


def said_of_recipes():
    plain, steered = groups("cifar100")
    yield "cifar100", f"Expect {with_spread(plain)} % top-1"
    yield "cifar100", f"NeuTRENO (λ̃ = 0.6) {with_spread(steered)} %"
    for group in groups("wikitext2"):
        yield from ((place, f"{group['mean']:.2f}") for place in ("wikitext2", "docs/language.md"))


def said_of_camvid():
    page, pair, kept = "docs/segmentation.md", groups("camvid"), runs_of("camvid")
    runs = [kept[Path(group["runs"]["0"]).name] for group in pair]
    for label, group, run in zip(("plain", "NeuTRENO, λ̃ = 0.6"), pair, runs, strict=True):
        yield page, f"| {label} | {group['mean']:.2f} | {run['result']['scores']['miou']:.2f} |"
    yield "camvid", "test mIoU of {:.2f}, with NeuTRENO (λ̃ = 0.6) {:.2f},".format(*(group["mean"] for group in pair))
    yield page, f"a difference of {pair[1]['against_first']['mean']:.2f} points"
    for name, run in kept.items():
        (session,) = run["run"]["sessions"]
        changes = [f"--set {word}" for word in session["command"] if "=" in word]
        yield page, " ".join(["acutance train camvid --data-dir data --out", f"runs/{name} $WHAT", *changes[4:]])
        yield from (("camvid", change) for change in changes[:2])


def said_of_layers_and_training():
    profiles = [Profile.load(EVIDENCE / "cifar100" / f"measure-{name}.json") for name in LABELS]
    metrics = {"token_cosine": "token cosine", "hfc_lfc_frobenius": "HFC/LFC (Frobenius)"}
    for metric, label in {**metrics, "rank_residual": "rank residual"}.items():
        for place, tap in {"stream": "block", "attention branch": "attention"}.items():
            by_layer = ({r.layer: r.mean for r in profile.select(metric, tap)} for profile in profiles)
            cells = (", ".join(f"{found[layer]:.3f}" for layer in (1, 6, 12)) for found in by_layer)
            yield "docs/measure.md", f"| {label}, {place} | {' | '.join(cells)} |"
    rows = {(r["model"], r["metric"], r["layer"], r["step"]): r for r in rows_of("cifar100", "monitor.csv")}
    for name in LABELS:
        row = rows[name, "hfc_lfc_frobenius", "12", "9700"]
        yield "docs/monitor.md", f"{float(row['mean']):.2f} ± {float(row['std']):.2f}"


def said_of_robustness():
    some, many = (
        [RobustnessTable.load(EVIDENCE / "robustness" / f"cifar100-{name}{ending}.json") for name in LABELS]
        for ending in ("", "-h200")
    )
    assert [table.context["images"] for table in some + many] == [1000, 1000, 10_000, 10_000]
    ten = list(CORRUPTIONS)[:10]
    lines = {
        "1,000 test images, clean": [table["clean"] for table in some],
        "… mean of 19 corruptions at 5 severities": [table.mean() for table in some],
        "… `fgsm:1`": [table["fgsm:1"] for table in some],
        "… `pgd:1`, 20 steps": [table["pgd:1:20:0.125"] for table in some],
        "10,000 test images, clean": [table["clean"] for table in many],
        "… mean of the first 10 corruptions at 5 severities": [
            statistics.mean(table[f"{name}:{level}"] for name in ten for level in SEVERITIES) for table in many
        ],
    }
    for label, (plain, steered) in lines.items():
        difference = f"{steered - plain:+.2f}".replace("-", "−")
        yield "docs/robustness.md", f"| {label} | {plain:.2f} | {steered:.2f} | {difference} |"


@pytest.mark.parametrize(
    "told", [said_of_cifar100, said_of_recipes, said_of_camvid, said_of_layers_and_training, said_of_robustness]
)
def test_what_is_published_is_what_the_records_hold(told):
    said = list(told())
    assert len(said) >= 6
    assert [(place, text) for place, text in said if text not in words(place)] == []


def test_scores_are_those_of_the_evaluations():
    for data in (*BATCHES, "wikitext2", "camvid"):
        for group in groups(data):
            for seed, place in group["runs"].items():
                kept = runs_of(data)[Path(place).name]
                assert group["scores"][seed] == kept["evaluation"]["scores"][kept["evaluation"]["headline"]]
                assert kept["run"]["config"]["loop"]["seed"] == int(seed)
