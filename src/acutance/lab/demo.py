"""The library's main job in small: train three 12-layer ViTs on real digits, measure them by layer, compare them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from acutance.diagnose import Diagnosis, diagnose
from acutance.diagnose.quality import Quality, measure_quality
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write
from acutance.io.saving import load
from acutance.lab import recipes
from acutance.lab.evaluate.statistics import spread_of, with_spread
from acutance.lab.studies.runs import merge
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import Config, Run, override, train
from acutance.lab.train.provenance import hardware, versions
from acutance.measure import measure
from acutance.measure.profile import Profile
from acutance.report.page import write_page
from acutance.report.pictures import plot_curves

VARIANTS = {"plain": "none", "NeuTRENO": "neutreno:0.6", "NeuTRENO + FeatScale": "neutreno:0.6+featscale"}
# The digits recipe, deep enough for smoothing to show (12 layers, like DeiT) and short enough for two CPU cores.
CHANGES = (
    "task.model.depth=12", "task.train_on=all", "task.augment.crop_pad=0", "optim.lr=1e-3", "optim.clip=none",
    "schedule.warmup=1.2", "loop.epochs=12", "loop.ema=none", "loop.monitor_every=none", "loop.evaluate_every=12",
)  # fmt: skip
METRICS = [
    "token_cosine", "hfc_lfc_spectral", "rank_residual", "effective_rank", "nonlocal_energy", "attention_entropy",
]  # fmt: skip
# The columns of the closing table: (metric, tap), at the last layer.
SHOWN = {
    "cosine, stream": ("token_cosine", "block"),
    "cosine, branch": ("token_cosine", "attention"),
    "cosine, normed": ("token_cosine", "final"),
    "HFC/LFC, stream": ("hfc_lfc_spectral", "block"),
}
Trained = tuple[Quality, Profile]  # test accuracy, image by image, and the measurement


def demo_config(*changes: str) -> Config:
    """The demo's configuration, with changes as `acutance train --set` takes them."""
    return override(recipes.load("digits"), [*CHANGES, *changes])


def trained(config: Config, folder: Path, device: str = "cpu") -> tuple[nn.Module, ClassificationTask]:
    """The model that this configuration trains, silently, and its task. The run in the folder is reused or resumes."""
    run = Run(folder)
    train(config, folder, resume=run.exists(), device=device, console=Console(quiet=True))
    task = ClassificationTask(config.task, seed=config.loop.seed, device=torch.device(device))
    return load(run.model_path).to(device), task


def run_demo(
    folder: Path, *, seeds: int = 1, changes: Sequence[str] = (), console: Console | None = None
) -> dict[str, list[Trained]]:
    """Train, measure and compare every variant. Finished runs in `folder` are reused, and interrupted ones resume.

    Writes a run and a profile per variant and seed, then `results.json`, `report.html` and `report.png`.
    """
    console, config = console or Console(), demo_config(*changes)
    runs: dict[str, list[Trained]] = {variant: [] for variant in VARIANTS}
    for seed, (variant, mitigation) in product(range(seeds), VARIANTS.items()):
        place = folder / f"{variant.lower().replace(' + ', '-')}-seed{seed}"
        own = override(config, [f"task.model.mitigation={mitigation}", f"loop.seed={seed}"])
        runs[variant].append(_train_and_measure(Run(place), own, console))
    summary, verdict = summarise(runs), conclude(runs)
    results = {"verdict": verdict, "summary": summary, "seeds": seeds, "config": config.to_dict()}
    results["accuracy"] = {variant: [accuracy.mean for accuracy, _ in done] for variant, done in runs.items()}
    results |= {"versions": versions(), "hardware": hardware()}
    atomic_write(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False).encode())
    profiles = {v: merge(p for _, p in done) if seeds > 1 else done[0][1] for v, done in runs.items()}
    write_page(profiles, folder / "report.html", verdict=verdict, summary=summary)
    title = f"{config.task.model.depth}-layer ViTs on handwritten digits, {seeds} seed(s)"
    picture = plot_curves(profiles, [SHOWN["cosine, branch"], SHOWN["cosine, stream"], SHOWN["HFC/LFC, stream"]], title)
    atomic_write(folder / "report.png", lambda path: picture.savefig(path, dpi=150))
    table = Table(*summary[0], title="accuracy and smoothing at the last layer", title_justify="left")
    for row in summary:
        table.add_row(*row.values())
    console.print(table, f"\n{verdict}\n\nOpen {escape(str(folder / 'report.html'))} to look at it layer by layer.")
    console.print(_diagnosis(folder / "plain-seed0", config))
    return runs


def _diagnosis(folder: Path, config: Config) -> Diagnosis:
    """What is wrong with the plain model, and what to try."""
    task, run = ClassificationTask(config.task, seed=0, device=torch.device("cpu")), Run(folder)
    batches = task.inputs("test", range(task.size("test"))).split(config.loop.batch_size)
    about = {"name": str(folder), "data": "the test images", "options": ""}
    return diagnose(load(run.model_path), batches, progress=False, context=about)


def _train_and_measure(run: Run, config: Config, console: Console) -> Trained:
    try:
        finished = run.exists() and run.result() is not None
        same = run.exists() and run.config() == config and (run.model_path.is_file() or not finished)
    except AcutanceError:  # damaged, or of an older demo
        same = False
    if same and finished:
        console.print(f"reusing {escape(str(run.folder))} (same configuration)")
    elif run.exists() and not same:
        shutil.rmtree(run.folder)
    train(config, run.folder, recipe="digits", resume=same, device="cpu", console=console)
    task, model = ClassificationTask(config.task, seed=0, device=torch.device("cpu")), load(run.model_path)
    parts = (part.split(config.loop.batch_size) for part in task.labelled("test", range(task.size("test"))))
    batches = [*zip(*parts, strict=True)]
    profile = measure(model, batches, metrics=METRICS, tap=["block", "attention", "final"], progress=False)
    profile.save(run.folder / "profile.json")
    return measure_quality(model, batches)[0], profile


def summarise(runs: Mapping[str, Sequence[Trained]]) -> list[dict[str, str]]:
    """One row per variant: accuracy and smoothing at the last layer, mean ± standard deviation over seeds.

    With one seed, accuracy has its 95 % interval over the test images.
    """

    def shown(values: Sequence[float], digits: int) -> str:
        return with_spread(fmean(values), spread_of(values), digits)

    def accuracy(done: Sequence[Trained]) -> str:
        if len(done) > 1:
            return shown([quality.mean for quality, _ in done], 2)
        return "{:.2f} ({:.2f} to {:.2f})".format(done[0][0].mean, *done[0][0].interval())

    return [
        {"variant": variant, "accuracy %": accuracy(done)}
        | {label: shown([float(profile[key][-1]) for _, profile in done], 3) for label, key in SHOWN.items()}
        for variant, done in runs.items()
    ]


def conclude(runs: Mapping[str, Sequence[Trained]]) -> str:
    """One sentence that says what was found, and how strong the evidence is."""

    def change(what: str, before: Sequence[float], after: Sequence[float], spec: str, is_clear: bool = True) -> str:
        """For example "lowered token cosine (0.412 → 0.301)", by the paired differences over the seeds."""
        differences, old, new = np.subtract(after, before), f"{fmean(before):{spec}}", f"{fmean(after):{spec}}"
        error = spread_of(differences) / len(differences) ** 0.5  # NaN for one pair, which no difference is within
        clear = old != new and not abs(differences.mean()) <= 2 * error and is_clear
        verb = "raised" if differences.mean() > 0 else "lowered"
        return f"{verb if clear else 'did not clearly change'} {what} ({old} → {new})"

    found, stream, plain = [], SHOWN["cosine, stream"], runs["plain"]
    for variant, done in list(runs.items())[1:]:
        before, after = ([float(profile[stream][-1]) for _, profile in both] for both in (plain, done))
        smoother = change("token cosine after the last block", before, after, ".3f")
        images = plain[0][0].change(done[0][0])  # paired over the test images, which one seed is judged by
        clear = len(plain) > 1 or images.verdict != "no clear change"
        first, second = ([accuracy.mean for accuracy, _ in each] for each in (plain, done))
        better = change("test accuracy in %", first, second, ".2f", clear)
        found.append(f"{variant} {smoother} and {better}")
    worth = (
        "accuracy by a 95 % interval over the images; one seed is an example, not evidence: --seeds 5 gives the spread"
    )
    if len(plain) > 1:
        worth = f"{len(plain)} paired seeds, a difference within two standard errors counts as none"
    return f"Against the plain ViT, {'; '.join(found)} ({worth})."
