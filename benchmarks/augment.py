"""How many images a second the augmentation on the device gives: DeiT's, on 32×32 images, compiled and not.

    python benchmarks/augment.py
    python benchmarks/augment.py --batch 2048 --label large

Each part is timed as it is used: parameters are drawn anew for every batch, on the device; 50,000 random images live
there, and a random batch of them is taken. On the CPU a toy size is timed, and nothing is compiled unless --compile is
given: it shows that the script runs. Every variant is timed in pairs beside `normalise alone`. Results go to
benchmarks/results, one CSV per device, versions and --label; a file of that name is rewritten.
"""

import argparse
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Candidate, Pace, Step, compare
from acutance.lab.data.augment import DEIT_SMALL_IMAGES, Augment, AugmentConfig
from acutance.lab.data.seeds import generator

CONFIGS = {
    "normalise alone": AugmentConfig(),
    "crop and flip": AugmentConfig(crop_pad=4, flip=0.5),
    "all but RandAugment": replace(DEIT_SMALL_IMAGES, rand_layers=0),
    "DeiT": DEIT_SMALL_IMAGES,
}


def batch_maker(config: AugmentConfig, compiled: bool, arguments: argparse.Namespace) -> Step:
    """Makes one batch after another, each with parameters of its own."""
    device = arguments.device
    images = torch.randint(256, (arguments.images, 3, 32, 32), dtype=torch.uint8, device=device)
    labels = torch.randint(100, (arguments.images,), device=device)
    augment = Augment(config, classes=100, mean=(0.507, 0.487, 0.441), std=(0.267, 0.256, 0.276), device=device)
    run: Any = torch.compile(augment.__call__, fullgraph=True, dynamic=False) if compiled else augment
    steps = count()

    def make() -> Any:
        random = generator(device, 0, next(steps))
        chosen = torch.randint(len(images), (arguments.batch,), generator=random, device=device)
        return run(images[chosen], labels[chosen], augment.draw(arguments.batch, random))

    return make


def benchmark(arguments: argparse.Namespace) -> list[Row]:
    """Each mode by itself, beside `normalise alone`."""
    pace, found = Pace(arguments.repetitions, arguments.steps, warm_up=2, refresh=0), []
    for compiled in (False, True) if arguments.compile else (False,):
        mode = "compiled" if compiled else "eager"
        candidates = [
            Candidate(name, partial(batch_maker, config, compiled, arguments), mode, name == "normalise alone")
            for name, config in CONFIGS.items()
        ]
        *_, rows = compare(candidates, pace, arguments.device)
        for row in (row for row in rows if "ms" in row):
            row["images_per_second"] = round(1e3 * arguments.batch / float(row["ms"]))
        found += rows
    return found


def main() -> None:
    parser = results.script_parser(__doc__)
    parser.add_argument("--batch", type=int, help="1024; 16 on the CPU")
    parser.add_argument("--images", type=int, help="50,000; 64 on the CPU")
    parser.add_argument("--steps", type=int, help="per timing: 100; 2 on the CPU")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="yes; no on the CPU")
    parser.add_argument("--label", default="")
    arguments = parser.parse_args()
    usual = {"batch": (16, 1024), "images": (64, 50_000), "steps": (2, 100), "compile": (False, True)}
    for name, values in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values[arguments.device == "cuda"])
    torch.manual_seed(0)
    rows = benchmark(arguments)
    results.show(rows, "variant", "mode", "images_per_second", "ratio", "ratio_q1", "ratio_q3", "note")
    shared = {"batch": arguments.batch, "steps": arguments.steps}
    where = arguments.results, arguments.device, "uint8", arguments.label
    print(results.script_rows("augment", rows, *where, **shared))


if __name__ == "__main__":
    main()
