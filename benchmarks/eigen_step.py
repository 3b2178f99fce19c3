"""What a spectrum costs: the training step of ViT-Ti⁻ for every basis, as ratios to plain ViT-Ti.

    python benchmarks/eigen_step.py
    python benchmarks/eigen_step.py --mode reduce-overhead

On CUDA: ViT-Ti/4 on 32×32 images, batch 1024, bfloat16 autocast, torch.compile, fused AdamW. All variants live in one
process and take turns. In a repetition every basis is timed right beside the plain model, --steps steps of each, the
plain one first or last by turns, and the ratio is taken within such a pair: what drifts (clocks, the host's other work)
reaches both alike. Reported are median, quartiles, smallest and largest over the repetitions. With --mode
reduce-overhead the steps are CUDA graphs, and do not wait for the host's launches; a basis whose library calls cannot
be captured is left out with a line that says so. On the CPU a toy model is timed without compiling: it shows that the
script runs, not what a step costs. Results go to benchmarks/results, one CSV per device, dtype, versions, mode and
--label; a file of that name is rewritten, after every repetition, so that an interruption keeps what is done.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import training_step
from acutance.lab.bench.timing import Candidate, Pace, Step, compare
from acutance.models import ViT, vit_tiny_cifar

BASES = ("qr", "polar", "cayley", "householder", "inverse")
VARIANTS = ["plain", *(f"eigen:negative,basis={basis}" for basis in BASES)]
TOY = {"image_size": 8, "patch_size": 4, "dim": 48, "depth": 2, "heads": 3, "num_classes": 10}


def build(variant: str, device: str) -> ViT:
    torch.manual_seed(0)
    options: dict[str, Any] = {} if device == "cuda" else dict(TOY)
    return vit_tiny_cifar(**options, mitigation=None if variant == "plain" else variant).to(device)


def step_of(variant: str, arguments: argparse.Namespace) -> Step:
    """Forward, backward and optimiser on fixed random data."""
    model = build(variant, arguments.device)
    config = model.config
    images = torch.randn(arguments.batch, 3, config.image_size, config.image_size, device=arguments.device)
    labels = torch.randint(config.num_classes, (arguments.batch,), device=arguments.device)
    loss_of = nn.CrossEntropyLoss()
    return training_step(
        model,
        [images],
        lambda scores: loss_of(scores, labels),
        mode=arguments.mode if arguments.compile else "eager",
        dtype=getattr(torch, arguments.dtype),
    )


def benchmark(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of all repetitions so far, after every repetition."""
    pace = Pace(arguments.repetitions, arguments.steps, arguments.warm_up, refresh=3)
    candidates = [
        Candidate(
            variant,
            partial(step_of, variant, arguments),
            baseline=position == 0,
            static=arguments.mode == "reduce-overhead",
        )
        for position, variant in enumerate(arguments.variants)
    ]
    return compare(candidates, pace, arguments.device)


def write(rows: list[Row], arguments: argparse.Namespace) -> Path:
    compiled, mode = arguments.compile, "" if arguments.mode == "default" else arguments.mode
    shared = {name: getattr(arguments, name) for name in ("label", "batch", "steps")}
    shared |= {"mode": arguments.mode if compiled else "eager", "compiled": compiled}
    where = arguments.results, arguments.device, arguments.dtype
    return results.script_rows("eigen_step", rows, *where, mode, arguments.label, **shared)


def main() -> None:
    parser = results.script_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of autocast; bfloat16 on CUDA")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="the first is what the others are divided by")
    parser.add_argument("--batch", type=int, help="images a step; 1024 on CUDA")
    parser.add_argument("--steps", type=int, default=25, help="timed together in one repetition")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--mode", default="default", choices=["default", "reduce-overhead"], help="of torch.compile")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA only")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 products: V is then orthogonal to 1e-3 only")
    parser.add_argument("--label", default="", help="put at the end of the file's name, to tell settings apart")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    arguments.batch = arguments.batch or (1024 if on_gpu else 8)
    arguments.compile = on_gpu if arguments.compile is None else arguments.compile
    torch._dynamo.config.recompile_limit = 64  # the variants share their code, and each is compiled for itself
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    for rows in benchmark(arguments):
        path = write(rows, arguments)
    results.show(rows, "variant", "ms", "ratio", "ratio_q1", "ratio_q3", "note")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
