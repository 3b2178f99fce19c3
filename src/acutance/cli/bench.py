"""`acutance bench`."""

from pathlib import Path
from typing import Annotated

from acutance.cli.options import Device, console, option, say, stoppable


def bench(
    only: Annotated[str | None, option("Some groups, with commas between; all by default.")] = None,
    quick: Annotated[bool, option("Four repetitions with half of the steps.", "--quick")] = False,
    max_autotune: Annotated[bool, option("Also this mode of the baseline in steps.", "--max-autotune")] = False,
    out: Annotated[Path, option("Where the CSV files go.")] = Path("acutance-bench"),
    device: Device = "auto",
) -> None:
    """Time the library on your own GPU, and write CSV files named by GPU, dtype and versions.

    All figures are ratios in one run: variants take turns beside a baseline. A group, or a part of one, is one file:

    - steps: training and inference with NeuTRENO against timm's plain ViT (parts: steps-32, steps-224).
    - end-to-end: images a second of the recipe for CIFAR-100, augmentation included (parts by batch: end-to-end-256,
      end-to-end-512, end-to-end-1024, end-to-end-2048).
    - eigen: training with a negative spectrum, ViT-Ti⁻, against ViT-Ti.
    - micro: the fused attention by itself, against SDPA and against its floor in bytes and FLOPs.
    - efficiency: NeuTRENO's FLOPs, memory and time against plain, at inference.
    - measure: `measure` against a plain forward pass, and against whole attention matrices.
    - long: language models, up to 131,072 tokens (parts: long-training, long-tokens, long-model).

    Each part takes a few minutes on an H200. On a CPU toy sizes run, in less than a minute for all: they show that
    everything works, not what it costs. Stop it when you like: finished figures are in the files, and a part that
    fails does not stop the others.

    Example: acutance bench --only micro,efficiency --quick
    """
    from acutance.distributed import device as device_of
    from acutance.lab.bench.run import chosen_groups, run_groups
    from acutance.lab.bench.timing import Settings

    names = chosen_groups(only)
    settings = Settings(device_of(device), quick, max_autotune)
    if not settings.on_gpu:
        say("No GPU: toy sizes on the CPU, to see that everything runs. The ratios mean nothing.")
    with stoppable(f"Finished figures are in {out}."):
        for path in run_groups(names, settings, out, console):
            say(f"wrote {path}")
