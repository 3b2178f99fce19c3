"""What watching costs: training with an `acutance.Monitor` as a ratio to training without.

    python benchmarks/monitor_cost.py
    python benchmarks/monitor_cost.py --every 100 --repetitions 9 --variants default bfloat16

On CUDA: DeiT-Ti at 224×224, batch 256, bfloat16 autocast, torch.compile, fused AdamW. All happens in one process: a
repetition times --every training steps without a monitor, then as many with each variant of it, which reads once and
writes JSONL and TensorBoard; every second repetition goes the other way round, so that a drifting clock reaches all
alike. The ratio is taken within a repetition; reported are the median over the repetitions, the smallest and the
largest. A reading is timed by itself too, in units of a training step, as a ratio so close to 1 drowns in noise:
divided by the interval it is the share of training time, and from the largest follows the shortest interval that keeps
below 2 %. On the CPU a toy model is timed without compiling: it shows that the script runs, not what watching costs.
Results go to benchmarks/results, one CSV per device, dtype and versions.
"""

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

import acutance as ac
from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Step, repeat, seconds_per_step, spread, training_step
from acutance.measure import DEFAULT_METRICS
from acutance.measure.monitor import CHEAP_METRICS, INTERVAL
from acutance.models import ViT, deit_tiny

TOY = {"image_size": 8, "patch_size": 2, "dim": 48, "depth": 4, "heads": 3, "num_classes": 10}
LIMIT = 0.02


@dataclass(frozen=True)
class Variant:
    metrics: tuple[str, ...] = CHEAP_METRICS
    autocast: torch.dtype | None = None
    tap: tuple[str, ...] = ("block",)
    whole_batch: bool = False  # as many samples as a training step, not --probe of them


VARIANTS = {
    "default": Variant(),
    "bfloat16": Variant(autocast=torch.bfloat16),
    "whole batch": Variant(whole_batch=True),
    "attention": Variant((*CHEAP_METRICS, "attention_entropy", "nonlocal_energy"), tap=("block", "attention")),
    "spectral": Variant(DEFAULT_METRICS),  # measure's own, which need eigenvalues
}


def noise(model: ViT, samples: int, device: str) -> torch.Tensor:
    size = model.config.image_size
    return torch.randn(samples, 3, size, size, device=device)


def watched_by(name: str, model: ViT, arguments: argparse.Namespace, folder: Path) -> ac.Monitor:
    chosen = VARIANTS[name]
    return ac.Monitor(
        model,
        noise(model, arguments.batch if chosen.whole_batch else arguments.probe, arguments.device),
        metrics=chosen.metrics,
        tap=chosen.tap,
        autocast=chosen.autocast,
        every=arguments.every,
        jsonl=folder / f"{name}.jsonl",
        tensorboard=folder / name,
    )


def benchmark(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    torch.manual_seed(0)
    device, mode, dtype = arguments.device, "default" if arguments.compile else "eager", getattr(torch, arguments.dtype)
    model = (deit_tiny() if device == "cuda" else ViT(**TOY)).to(device)
    images = noise(model, arguments.batch, device)
    labels = torch.randint(model.config.num_classes, (arguments.batch,), device=device)
    train = training_step(model, [images], lambda scores: F.cross_entropy(scores, labels), mode=mode, dtype=dtype)
    monitors = {name: watched_by(name, model, arguments, folder) for name in arguments.variants}

    def steps(after: Step = lambda: None) -> None:
        for _ in range(arguments.every):
            train()
            after()

    repeat(train, arguments.warm_up)
    for monitor in monitors.values():
        monitor.record()  # what only the first reading pays
    segments: dict[str, Step] = {"without": steps}
    segments |= {name: lambda watch=monitor.step: steps(watch) for name, monitor in monitors.items()}
    times: dict[str, list[float]] = {name: [] for name in segments}
    readings: dict[str, list[float]] = {name: [] for name in monitors}
    for repetition in range(arguments.repetitions):
        for name in list(segments)[:: -1 if repetition % 2 else 1]:
            times[name].append(seconds_per_step(segments[name], 1, arguments.device))
            if name in monitors:
                each = [seconds_per_step(monitors[name].record, 1, arguments.device) for _ in range(arguments.readings)]
                readings[name].append(statistics.median(each))
        print(f"repetition {repetition + 1} of {arguments.repetitions}", file=sys.stderr, flush=True)
    return [row(name, arguments, times[name], readings[name], times["without"]) for name in monitors]


def row(name: str, arguments: argparse.Namespace, *seconds: list[float]) -> Row:
    times, readings, without = seconds
    ratios = [mine / plain for mine, plain in zip(times, without, strict=True)]
    in_steps = [one / (plain / arguments.every) for one, plain in zip(readings, without, strict=True)]
    chosen = VARIANTS[name]
    return {
        "variant": name,
        "metrics": " ".join(chosen.metrics),
        "taps": " ".join(chosen.tap),
        "probe": arguments.batch if chosen.whole_batch else arguments.probe,
        "autocast": str(chosen.autocast).removeprefix("torch."),
        "step_ms": f"{1e3 * statistics.median(without) / arguments.every:.3f}",
        "reading_ms": f"{1e3 * statistics.median(readings):.3f}",
        **spread("reading_in_steps", in_steps, ".3f"),
        **spread("ratio", ratios, ".4f"),
        "share_percent": f"{100 * statistics.median(in_steps) / arguments.every:.3f}",
        "share_percent_max": f"{100 * max(in_steps) / arguments.every:.3f}",
        "every_for_2_percent": math.ceil(max(in_steps) / LIMIT),
    }


def main() -> None:
    parser = results.script_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of training's autocast; bfloat16 on CUDA")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--every", type=int, default=INTERVAL, help="the interval, and the steps timed together")
    parser.add_argument("--batch", type=int, help="images a step; 256 on CUDA")
    parser.add_argument("--probe", type=int, help="images a reading; 64 on CUDA")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--readings", type=int, default=3, help="timed one by one in a repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA only")
    arguments = parser.parse_args()
    usual = {"dtype": ("float32", "bfloat16"), "batch": (16, 256), "probe": (4, 64), "compile": (False, True)}
    for name, values in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values[arguments.device == "cuda"])
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmark(arguments, Path(folder))
    results.show(rows, "variant", "probe", "reading_ms", "reading_in_steps", "share_percent", "ratio")
    shared = {name: getattr(arguments, name) for name in ("batch", "every", "repetitions")}
    where = arguments.results, arguments.device, arguments.dtype
    print(results.script_rows("monitor_cost", rows, *where, **shared, compiled=arguments.compile))


if __name__ == "__main__":
    main()
