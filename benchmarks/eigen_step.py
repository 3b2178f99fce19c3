"""What a spectrum costs: the training step of ViT-Ti⁻ for every basis, as ratios to plain ViT-Ti.

    python benchmarks/eigen_step.py
    python benchmarks/eigen_step.py --variants plain eigen:negative,basis=polar --repetitions 12 --label longer

On CUDA: ViT-Ti/4 on 32×32 images, batch 1024, bfloat16 autocast, torch.compile, fused AdamW. All variants live in one
process and take turns: a repetition times --steps steps of each, so that a drifting clock reaches all alike, and the
ratio is taken within a repetition. Reported are the median over the repetitions and the smallest and largest. On the
CPU a toy model is timed without compiling: it shows that the script runs, not what a step costs. Results go to
benchmarks/results, one CSV per device, dtype, PyTorch version and --label; a file of that name is rewritten.
"""

import argparse
import csv
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acutance.models import ViT, vit_tiny_cifar

RESULTS = Path(__file__).parent / "results"
BASES = ("qr", "polar", "cayley", "householder", "inverse")
VARIANTS = ["plain", *(f"eigen:negative,basis={basis}" for basis in BASES)]
TOY = {"image_size": 8, "patch_size": 4, "dim": 48, "depth": 2, "heads": 3, "num_classes": 10}

Step = Callable[[], None]
Row = dict[str, Any]


def build(variant: str, device: str) -> ViT:
    torch.manual_seed(0)
    options: dict[str, Any] = {} if device == "cuda" else dict(TOY)
    return vit_tiny_cifar(**options, mitigation=None if variant == "plain" else variant).to(device)


def training_step(variant: str, arguments: argparse.Namespace) -> Step:
    """Forward, backward and optimiser on fixed random data."""
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    model = build(variant, device)
    config = model.config
    images = torch.randn(arguments.batch, 3, config.image_size, config.image_size, device=device)
    labels = torch.randint(config.num_classes, (arguments.batch,), device=device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    run: Any = torch.compile(model, dynamic=False) if arguments.compile else model
    loss_of = nn.CrossEntropyLoss()

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss = loss_of(run(images), labels)
        loss.backward()
        optimiser.step()

    return step


def seconds_per_step(step: Step, steps: int, device: str) -> float:
    """CUDA events around all the steps, so that the queue stays full as it does in training."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / 1e3 / steps


def warmed_up(variant: str, arguments: argparse.Namespace) -> Step:
    """Compiled and run a few times."""
    start = time.perf_counter()
    step = training_step(variant, arguments)
    seconds_per_step(step, arguments.warm_up, arguments.device)
    print(f"{variant}: ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return step


def benchmark(arguments: argparse.Namespace) -> list[Row]:
    steps = {variant: warmed_up(variant, arguments) for variant in arguments.variants}
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(arguments.repetitions):
        for variant, step in steps.items():
            seconds_per_step(step, 3, arguments.device)  # its own weights back into the caches
            times[variant].append(seconds_per_step(step, arguments.steps, arguments.device))
    plain = times[arguments.variants[0]]
    return [row(variant, times[variant], plain) for variant in steps]


def row(variant: str, times: list[float], plain: list[float]) -> Row:
    ratios = [mine / other for mine, other in zip(times, plain, strict=True)]
    return {
        "variant": variant,
        "ms": f"{1e3 * statistics.median(times):.3f}",
        "ms_min": f"{1e3 * min(times):.3f}",
        "ms_max": f"{1e3 * max(times):.3f}",
        "ratio": f"{statistics.median(ratios):.4f}",
        "ratio_min": f"{min(ratios):.4f}",
        "ratio_max": f"{max(ratios):.4f}",
    }


def write(rows: list[Row], arguments: argparse.Namespace) -> Path:
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU, toy size"
    path = arguments.results / file_name(name, torch.__version__, arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = {
        "label": arguments.label,
        "batch": arguments.batch,
        "steps": arguments.steps,
        "repetitions": arguments.repetitions,
        "compiled": arguments.compile,
        "device": name,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, cuda {torch.version.cuda}",
        "command": command(sys.argv[1:]),
    }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], *shared], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**result, **shared} for result in rows)
    return path


def file_name(device: str, version: str, arguments: argparse.Namespace) -> str:
    """All of a file's name, so that none needs to be given one by hand."""
    parts = [
        "eigen_step",
        slug(device) if arguments.device == "cuda" else "cpu",
        arguments.dtype,
        f"torch{version.split('+')[0]}",
        slug(arguments.label),
    ]
    return "-".join(part for part in parts if part) + ".csv"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def command(given: list[str]) -> str:
    """What was measured, as a command; where the file went is not part of it."""
    kept = list(given)
    for position, word in enumerate(given):
        if word == "--results":
            kept = [*given[:position], *given[position + 2 :]]
    kept = [word for word in kept if not word.startswith("--results=")]
    return shlex.join(["python", "benchmarks/eigen_step.py", *kept])


def show(rows: list[Row]) -> None:
    print(f"{'variant':<36}{'ms':>9}{'ratio':>9}   over the repetitions")
    for result in rows:
        spread = f"{result['ratio_min']} to {result['ratio_max']}"
        print(f"{result['variant']:<36}{result['ms']:>9}{result['ratio']:>9}   {spread}")


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of autocast; bfloat16 on CUDA")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="the first is what the others are divided by")
    parser.add_argument("--batch", type=int, help="images a step; 1024 on CUDA")
    parser.add_argument("--steps", type=int, default=30, help="timed together in one repetition")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA only")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 products: V is then orthogonal to 1e-3 only")
    parser.add_argument("--label", default="", help="put at the end of the file's name, to tell settings apart")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the CSV goes")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    arguments.batch = arguments.batch or (1024 if on_gpu else 8)
    arguments.compile = on_gpu if arguments.compile is None else arguments.compile
    torch._dynamo.config.recompile_limit = 64  # the variants share their code, and each is compiled for itself
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    if not on_gpu:
        print("no CUDA: a toy model on the CPU, to see that everything runs. The ratios mean nothing", file=sys.stderr)
    rows = benchmark(arguments)
    show(rows)
    print(f"written to {write(rows, arguments)}", file=sys.stderr)


if __name__ == "__main__":
    main()
