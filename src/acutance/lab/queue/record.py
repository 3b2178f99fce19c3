"""The record of a run: everything that a table may need, measured before the weights are lost."""

import shlex
import time
import warnings
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as tensor_bytes
from torch import Tensor, nn

from acutance import distributed
from acutance.errors import AcutanceWarning
from acutance.explain import explain
from acutance.explain.weights import Norm
from acutance.files.atomic import atomic_write
from acutance.io.saving import load
from acutance.lab import locks
from acutance.lab.bench.timing import MIB
from acutance.lab.evaluate import evaluate_run
from acutance.lab.files import short
from acutance.lab.queue.jobs import Job
from acutance.lab.robustness import CORRUPTIONS, draw_once, evaluate, images_of
from acutance.lab.robustness.evaluate import CLEAN
from acutance.lab.tasks import samples
from acutance.lab.train.log import read_log
from acutance.lab.train.run import Run, in_a_name
from acutance.measure import measure
from acutance.models import Segmenter

READ_ON = 1000  # samples
METRICS = ("token_cosine", "rank_residual", "hfc_lfc_frobenius", "norm_spread", "attention_cosine")
NORMS: tuple[Norm, ...] = ("ignore", "fold")  # the poster's H leaves out the norm's weight; the layer's own includes it
POINTS = 25  # of a curve
LARGEST = 15_000_000  # bytes of weights in a file


def record(job: Job, folder: Path, shared: Path, *, data_dir: Path | None, device: str) -> dict[str, Any]:
    """Scores, similarity by layer, spectra, time, memory and curves of a finished run.

    `shared` is the folder that keeps corrupted test images for all runs.
    """
    began, run, split = time.perf_counter(), Run(folder), "val" if job.block.kind == "tune" else "test"
    on = distributed.device(device)
    peak = torch.cuda.max_memory_allocated(on) / MIB if on.startswith("cuda") else None
    evaluated = evaluate_run(folder, split=split, data_dir=data_dir, device=device)
    model = load(run.model_path).to(on)
    config, result = run.config(), run.result() or {}
    inputs, *_ = samples(config.task, split, READ_ON)
    part = "encoder" if isinstance(model, Segmenter) else None
    scores, cells = dict(evaluated.scores), None
    if split == "test" and config.task.kind == "classification":
        cells = corrupted(model, config.task, shared, data_dir)
        scores |= {f"corrupted_{count}": fmean(cells[name] for name in [*CORRUPTIONS][:count]) for count in (15, 19)}
    return {
        "split": split,
        "scores": short(scores),
        "corrupted": short(cells),
        "headline": evaluated.headline,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images_seen": result["step"] * config.loop.batch_size,
        "layers": by_layer(model, inputs, part),
        "spectra": spectra(model, part),
        "memory_mib": peak,
        **course(run),
        "seconds_reading": short(time.perf_counter() - began),
    }


def keep_weights(job: Job, run: Run, folder: Path) -> list[Path]:
    """Save the last weights in bfloat16, in files below 16 MB that hold the command which trains them again.

    A single file is a model that `acutance.load` reads. Of several files, join the tensors first.
    """
    with safe_open(str(run.model_path), framework="pt") as opened:
        about = opened.metadata() or {}
    parts: list[dict[str, Tensor]] = [{}]
    for name, value in load_file(run.model_path).items():
        small = value.bfloat16() if value.is_floating_point() else value
        if sum(kept.nbytes for kept in parts[-1].values()) + small.nbytes > LARGEST:
            parts.append({})
        parts[-1][name] = small
    last = [f"loop.seed={job.seed}", f"task.train_on={job.config.task.train_on}"]
    words = [word for change in (*job.block.set, *job.row.set, *last) for word in ("--set", change)]
    about["trained_by"] = shlex.join(["acutance", "train", job.block.recipe, *words])
    written = []
    for number, part in enumerate(parts, 1):
        name = f"{in_a_name(f'{job.block.name}-{job.row.label}')}-seed{job.seed}-{number}-of-{len(parts)}.safetensors"
        written.append(atomic_write(folder / name, tensor_bytes(part, about)))
    return written


def corrupted(model: nn.Module, task: Any, shared: Path, data_dir: Path | None) -> dict[str, float]:
    """Top-1 by corruption and by severity, on the published files if they are there, else on images drawn once."""
    images = images_of(task, "test", data_dir=data_dir)
    folder = (data_dir or shared) / f"{task.dataset.replace('cifar', 'CIFAR-')}-C"
    if not folder.is_dir():
        folder = shared / f"corrupted-{task.dataset}"
        while not (folder / "labels.npy").exists():  # written last
            with locks.held(shared / f".{folder.name}.lock") as mine:
                if mine:
                    draw_once(images.to(next(model.parameters()).device), folder)
            time.sleep(0 if mine else 1)
    table = evaluate(model, images, attacks=(), corrupted_dir=folder)
    return {name: value for name, value in table.summary().items() if name != CLEAN}


def by_layer(model: nn.Module, inputs: Tensor, part: str | None = None) -> dict[str, dict[str, Any]]:
    """Metrics of the stream, the attention branch and A, by tap, name and layer."""
    profile = measure(model, inputs.split(100), metrics=METRICS, tap=("block", "attention"), part=part, progress=False)
    found: dict[str, dict[str, Any]] = {}
    for reading in profile.readings:
        found.setdefault(reading.tap, {}).setdefault(reading.metric, {})[str(reading.layer)] = short(reading.mean)
    return found


def spectra(model: nn.Module, part: str | None = None) -> dict[str, Any]:
    """The spectrum of H by layer, without and with the norm's weight: the share of negative λ, and quantiles."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcutanceWarning)  # of crossed bounds, which the numbers show
        for norm in NORMS:
            layers = explain(model, norm=norm, part=part, progress=False).layers
            found[norm] = {
                "negative_share": [short(layer.negative_share) for layer in layers],
                "quantiles": [short(list(layer.quantiles)) for layer in layers],
                "symmetry": [short(layer.symmetry) for layer in layers],
            }
    return found


def course(run: Run) -> dict[str, Any]:
    """The course of training: thinned curves, scores during training, and the time per step."""
    log, config = read_log(run.folder), run.config()
    unit = next(name for name in log[0] if name.endswith("/s"))
    speeds = [line[unit] for line in log[1:]] or [line[unit] for line in log]  # the first line includes compilation
    points = log[:: -(-len(log) // POINTS)]
    curves = {name: [short(line[name]) for line in points] for name in ("epoch", "loss")}
    evaluated = [line for line in log if any(name.startswith("val/") for name in line)]
    if getattr(config.task, "train_on", "train") == "train":
        for name in (name for name in (evaluated or [{}])[0] if name.startswith("val/")):
            curves[name] = [[short(line["epoch"]), short(line[name])] for line in evaluated]
    step_ms = 1000 * config.loop.batch_size / median(speeds) if unit == "images/s" else None
    return {"step_ms": short(step_ms), "curves": curves}
