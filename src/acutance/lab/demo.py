"""The main job in small: train three 12-layer ViTs on real digits, measure them by layer, compare them."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from acutance.errors import AcutanceError
from acutance.explain.steer import check_spectrum
from acutance.files.atomic import atomic_write
from acutance.io.saving import save
from acutance.lab.data import Split, digits
from acutance.lab.tasks.classification import widen_start
from acutance.lab.train.optim import parameter_groups
from acutance.lab.train.schedule import warm_cosine
from acutance.measure import measure
from acutance.measure.profile import Profile, merge
from acutance.mitigations import parse
from acutance.models import ViT, vit_digits
from acutance.report import plot_curves, write_page
from acutance.version import __version__

VARIANTS: Mapping[str, str | None] = {
    "plain": None,
    "NeuTRENO": "neutreno:0.6",
    "NeuTRENO + FeatScale": "neutreno:0.6+featscale",
}
METRICS = (
    "token_cosine",
    "hfc_lfc_spectral",
    "rank_residual",
    "effective_rank",
    "nonlocal_energy",
    "attention_entropy",
)
TAPS = ("block", "attention", "final")
CHECKPOINT = "model.safetensors"
# The columns of the closing table: (metric, tap), read at the last layer.
SHOWN: Mapping[str, tuple[str, str]] = {
    "cosine, stream": ("token_cosine", "block"),
    "cosine, branch": ("token_cosine", "attention"),
    "cosine, normed": ("token_cosine", "final"),
    "HFC/LFC, stream": ("hfc_lfc_spectral", "block"),
}


@dataclass(frozen=True)
class DemoConfig:
    """Small enough for two CPU cores, deep enough (12 layers, as DeiT) for smoothing to show."""

    depth: int = 12
    dim: int = 48
    heads: int = 3
    patch_size: int = 2  # 8×8 images: 16 patches and a class token
    mlp_ratio: float = 2.0
    epochs: int = 12
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.1  # share of the steps


@dataclass(frozen=True)
class DemoRun:
    """One trained and measured model."""

    variant: str
    seed: int
    accuracy: float
    profile: Profile


def run_demo(
    folder: Path, *, seeds: int = 1, config: DemoConfig | None = None, console: Console | None = None
) -> dict[str, list[DemoRun]]:
    """Train, measure and compare every variant; finished runs found in `folder` are reused.

    Writes a checkpoint, a profile and a record per run, then `results.json`, `report.html` and `report.png`.
    """
    if seeds < 1:
        raise AcutanceError(f"the demo needs at least one seed, got {seeds}")
    config, console = config or DemoConfig(), console or Console()
    train, test = digits()
    task = f"{len(VARIANTS)} variants × {plural(seeds, 'seed')} on {len(train)} handwritten digits"
    console.print(f"training {task}, into {escape(str(folder))}")
    runs: dict[str, list[DemoRun]] = {name: [] for name in VARIANTS}
    for seed in range(seeds):
        for variant in VARIANTS:
            place = folder / f"{slug(variant)}-seed{seed}"
            done = load_run(place, variant, seed, config)
            if done is not None:
                console.print(f"reusing {escape(str(place))} (same configuration and versions)")
            runs[variant].append(done or _train_and_measure(place, variant, seed, config, train, test, console))
    summary, verdict = summarise(runs), conclude(runs)
    _write_reports(folder, runs, summary, verdict, config)
    console.print(
        _closing_table(summary),
        f"\n{verdict}\n\nOpen {escape(str(folder / 'report.html'))} to look at it layer by layer.",
    )
    return runs


def _train_and_measure(
    place: Path, variant: str, seed: int, config: DemoConfig, train: Split, test: Split, console: Console
) -> DemoRun:
    model = new_model(config, seed, VARIANTS[variant])
    with _progress(console, f"{variant}, seed {seed}", config.epochs) as advance:
        for _ in train_epochs(model, train, config, torch.Generator().manual_seed(seed)):
            advance()
    accuracy = evaluate(model, test)
    batches = list(test.batches(config.batch_size))
    profile = measure(model, batches, metrics=METRICS, tap=TAPS, progress=False)
    save(model, place / CHECKPOINT)
    profile.save(place / "profile.json")
    record = {
        "variant": variant,
        "seed": seed,
        "mitigation": VARIANTS[variant],
        "config": asdict(config),
        "accuracy": accuracy,
        "versions": versions(),
    }
    atomic_write(place / "run.json", json.dumps(record, indent=1).encode())  # last: it marks the run as finished
    return DemoRun(variant, seed, accuracy, profile)


def new_model(
    config: DemoConfig, seed: int, mitigation: str | None = None, *, attention: str = "softmax", widen: bool = True
) -> ViT:
    """The demo's ViT as it starts: a seed gives every variant the same weights; a mitigation is put in after that."""
    torch.manual_seed(seed)
    size = {name: getattr(config, name) for name in ("dim", "depth", "heads", "patch_size", "mlp_ratio")}
    model = vit_digits(**size, attention=attention)
    if widen:
        widen_start(model)
    if mitigation is not None:  # not before: an eigen starts from the weights it finds
        model.install(parse(mitigation))
    return model


def train_epochs(model: ViT, data: Split, config: DemoConfig, generator: torch.Generator) -> Iterator[int]:
    """Train in place with AdamW and a warmed-up cosine, yielding after each epoch.

    At the end a steered model whose spectrum has crossed the bound is warned of, see `check_spectrum`: at the μ_min
    that attention has on the first training images.
    """
    optimiser = torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.learning_rate)
    steps = config.epochs * math.ceil(len(data) / config.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: warm_cosine(step / steps, config.warmup))
    for epoch in range(config.epochs):
        model.train()
        for images, labels in data.batches(config.batch_size, generator):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            if not torch.isfinite(loss):
                raise AcutanceError(f"the loss became {loss.item()} in epoch {epoch}: lower the learning rate")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        yield epoch
    check_spectrum(model, batch=data.images[: config.batch_size])


@torch.no_grad()
def evaluate(model: nn.Module, data: Split) -> float:
    """Top-1 accuracy in percent."""
    model.eval()
    hits = sum(int((model(images).argmax(-1) == labels).sum()) for images, labels in data.batches(256))
    return 100 * hits / len(data)


def load_run(place: Path, variant: str, seed: int, config: DemoConfig) -> DemoRun | None:
    """A finished run of this very configuration and these versions, or None."""
    try:
        record = json.loads((place / "run.json").read_text(encoding="utf-8"))
        wanted = {
            "variant": variant,
            "seed": seed,
            "mitigation": VARIANTS[variant],
            "config": asdict(config),
            "versions": versions(),
        }
        if any(record[key] != value for key, value in wanted.items()) or not (place / CHECKPOINT).is_file():
            return None
        return DemoRun(variant, seed, record["accuracy"], Profile.load(place / "profile.json"))
    except (OSError, ValueError, LookupError, TypeError, AcutanceError):  # damaged in whatever way: train again
        return None


def summarise(runs: Mapping[str, Sequence[DemoRun]]) -> list[dict[str, str]]:
    """One row per variant: accuracy and smoothing at the last layer, mean ± spread over seeds."""
    return [
        {"variant": variant, "accuracy %": plus_minus([r.accuracy for r in done], ".2f")}
        | {label: plus_minus(_last(done, metric, tap), ".3f") for label, (metric, tap) in SHOWN.items()}
        for variant, done in runs.items()
    ]


def conclude(runs: Mapping[str, Sequence[DemoRun]]) -> str:
    """One sentence that says what was found, and how much it is worth."""
    plain = runs["plain"]
    found = [
        f"{variant} {_change('token cosine after the last block', plain, done, _last_cosine, '.3f')} and "
        f"{_change('test accuracy in %', plain, done, _accuracy, '.2f')}"
        for variant, done in runs.items()
        if variant != "plain"
    ]
    worth = "one seed is an example, not evidence: --seeds 5 gives mean ± spread"
    if len(plain) > 1:
        worth = f"{len(plain)} paired seeds, a difference within two standard errors counts as none"
    return f"Against the plain ViT, {'; '.join(found)} ({worth})."


def _change(
    what: str, plain: Sequence[DemoRun], treated: Sequence[DemoRun], read: Callable[[DemoRun], float], spec: str
) -> str:
    """For example "lowered token cosine (0.412 → 0.301)", by the paired differences over the seeds."""
    before, after = [read(run) for run in plain], [read(run) for run in treated]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    arrow = f"({mean(before):{spec}} → {mean(after):{spec}})"
    if abs(mean(differences)) <= 2 * error or f"{mean(before):{spec}}" == f"{mean(after):{spec}}":
        return f"did not clearly change {what} {arrow}"
    return f"{'raised' if mean(differences) > 0 else 'lowered'} {what} {arrow}"


def _last_cosine(run: DemoRun) -> float:
    return float(run.profile["token_cosine", "block"][-1])


def _accuracy(run: DemoRun) -> float:
    return run.accuracy


def plus_minus(values: Sequence[float], spec: str) -> str:
    """Mean ± standard deviation over seeds, or the value alone."""
    return f"{mean(values):{spec}}" + (f" ± {stdev(values):{spec}}" if len(values) > 1 else "")


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {"acutance": __version__, "torch": torch.__version__, "python": platform.python_version()}


def plural(count: int, noun: str) -> str:
    """1 seed, 2 seeds."""
    return f"{count} {noun}" + ("s" if count != 1 else "")


def slug(variant: str) -> str:
    """A folder name."""
    return variant.lower().replace(" + ", "-")


def _last(runs: Sequence[DemoRun], metric: str, tap: str) -> list[float]:
    return [float(run.profile[metric, tap][-1]) for run in runs]


def _write_reports(
    folder: Path,
    runs: Mapping[str, Sequence[DemoRun]],
    summary: Sequence[Mapping[str, str]],
    verdict: str,
    config: DemoConfig,
) -> None:
    seeds = len(runs["plain"])
    profiles = {name: merge(r.profile for r in done) if seeds > 1 else done[0].profile for name, done in runs.items()}
    results = {
        "verdict": verdict,
        "summary": list(summary),
        "accuracy": {name: [r.accuracy for r in done] for name, done in runs.items()},
        "seeds": seeds,
        "config": asdict(config),
        "versions": versions(),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }
    atomic_write(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False).encode())
    curves = {name: profile.curves() for name, profile in profiles.items()}
    write_page(curves, folder / "report.html", verdict=verdict, summary=summary)
    picture = plot_curves(
        curves,
        [("token_cosine", "attention"), ("token_cosine", "block"), ("hfc_lfc_spectral", "block")],
        f"{config.depth}-layer ViTs on handwritten digits, {plural(seeds, 'seed')}",
    )
    atomic_write(folder / "report.png", lambda path: picture.savefig(path, dpi=150))


def _closing_table(summary: Sequence[Mapping[str, str]]) -> Table:
    table = Table(title="accuracy and smoothing at the last layer", title_justify="left")
    for column in summary[0]:
        table.add_column(column)
    for row in summary:
        table.add_row(*row.values())
    return table


@contextmanager
def _progress(console: Console, description: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
