"""What training makes of H and of the affinities: small ViTs on the embedded digits, kept after every epoch.

    python benchmarks/over_training.py --seeds 5
    acutance lab kernel over-training/softmax-seed* over-training/symmetric-seed* --out docs/evidence/kernel

Trains the demo's 12-layer ViT with softmax attention from the demo's start and from DeiT's smaller one (σ = 0.02), with
symmetric attention, and steered (ViT⁺, ViT⁻), and reads from the checkpoints how symmetric every layer's H is
(`explain.symmetry_over`) and how far it has moved. One run takes about a minute on a CPU core; finished runs in
--runs are reused, so it can be stopped and started again.
The figures go to --out as symmetry.csv and symmetry.json; `acutance lab kernel` reads the same runs.
"""

import argparse
import csv
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from acutance.explain import symmetry_over
from acutance.explain.weights import Norm
from acutance.files.atomic import atomic_write
from acutance.io.saving import load, save
from acutance.lab.data import Split, digits
from acutance.lab.demo import CHECKPOINT, DemoConfig, evaluate, new_model, train_epochs, versions
from acutance.sites import find

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "symmetry"
# Options of `new_model`.
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-small": {"widen": False},
    "symmetric": {"attention": "symmetric"},
    "plus": {"mitigation": "eigen:positive"},
    "minus": {"mitigation": "eigen:negative"},
}
# Of H by itself, and of H diag(γ), γ the weight of the norm before it.
NORMS: dict[str, Norm] = {"symmetry": "ignore", "symmetry_with_norm": "fold"}

Row = dict[str, Any]


def train(place: Path, variant: str, seed: int, config: DemoConfig, data: tuple[Split, Split]) -> Iterator[None]:
    """Train one model, a checkpoint before the first and after every epoch; the record comes last."""
    model, start = new_model(config, seed, **VARIANTS[variant]), time.perf_counter()
    save(model, place / epoch_name(0))
    for epoch in train_epochs(model, data[0], config, torch.Generator().manual_seed(seed)):
        save(model, place / epoch_name(epoch + 1))
        yield
    save(model, place / CHECKPOINT)
    record = {
        **identity(variant, seed, config),
        "accuracy": evaluate(model, data[1]),
        "seconds": round(time.perf_counter() - start, 1),
    }
    atomic_write(place / "run.json", json.dumps(record, indent=1).encode())


def epoch_name(epoch: int) -> str:
    return f"epoch{epoch:02}.safetensors"


def identity(variant: str, seed: int, config: DemoConfig) -> Row:
    options = VARIANTS[variant]
    return {"variant": variant, "options": options, "seed": seed, "config": asdict(config), "versions": versions()}


def finished(place: Path, variant: str, seed: int, config: DemoConfig) -> Row | None:
    """The record of a finished run of this very configuration and these versions, or None."""
    try:
        record: Row = json.loads((place / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = identity(variant, seed, config)
    kept = [place / CHECKPOINT, *(place / epoch_name(n) for n in range(config.epochs + 1))]
    same = all(record.get(key) == value for key, value in wanted.items())
    return record if same and all(path.is_file() for path in kept) else None


def symmetry_rows(place: Path, record: Row) -> list[Row]:
    epochs, about = range(record["config"]["epochs"] + 1), {key: record[key] for key in ("variant", "seed")}
    files = [place / epoch_name(epoch) for epoch in epochs]
    found = {name: symmetry_over(files, norm=norm) for name, norm in NORMS.items()} | {"moved": moved(files)}
    return [
        {**about, "epoch": epoch, "layer": layer, **{name: table[epoch, layer - 1] for name, table in found.items()}}
        for epoch in epochs
        for layer in range(1, record["config"]["depth"] + 1)
    ]


@torch.no_grad()
def moved(files: list[Path]) -> NDArray[np.float64]:
    """‖H − H₀‖/‖H₀‖ with H₀ that of the first checkpoint: (checkpoints, layers)."""
    branches = [torch.stack([s.projection_weight() @ s.value_weight() for s in find(load(f))]) for f in files]
    size = branches[0].norm(dim=(1, 2))
    return torch.stack([(H - branches[0]).norm(dim=(1, 2)) / size for H in branches]).double().numpy()


def summary(rows: list[Row], records: list[Row]) -> list[Row]:
    """Per variant, as mean and spread over seeds: accuracy, and the mean over layers before and after training."""
    result = []
    for variant in dict.fromkeys(record["variant"] for record in records):
        done = [record for record in records if record["variant"] == variant]
        readings = {"accuracy": [record["accuracy"] for record in done]}
        for name in NORMS:
            readings[f"{name}_start"] = [over_layers(rows, record, 0, name) for record in done]
        for name in (*NORMS, "moved"):
            readings[f"{name}_end"] = [over_layers(rows, record, record["config"]["epochs"], name) for record in done]
        result.append({"variant": variant, **{name: spread(values) for name, values in readings.items()}})
    return result


def over_layers(rows: list[Row], record: Row, epoch: int, name: str) -> float:
    wanted = record["variant"], record["seed"], epoch
    return mean(row[name] for row in rows if (row["variant"], row["seed"], row["epoch"]) == wanted)


def spread(values: list[float]) -> Row:
    return {"mean": mean(values), "spread": stdev(values) if len(values) > 1 else 0.0, "seeds": values}


def write(rows: list[Row], records: list[Row], arguments: argparse.Namespace) -> list[Row]:
    found = summary(rows, records)
    body = {
        "command": shlex.join(["python", "benchmarks/over_training.py", *sys.argv[1:]]),
        "hardware": f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)",
        "versions": versions(),
        "config": records[0]["config"],
        "variants": VARIANTS,
        "symmetry": "cosine between H and its transpose; with_norm: the pre-norm's weight folded in",
        "moved": "how far H is from what it was before training, relative to its norm then",
        "summary": found,
        "seconds": {f"{record['variant']}-seed{record['seed']}": record["seconds"] for record in records},
    }
    atomic_write(arguments.out / "symmetry.json", json.dumps(body, indent=1, ensure_ascii=False).encode())

    def table(path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.5f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)

    atomic_write(arguments.out / "symmetry.csv", table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("over-training"), help="checkpoints, and what is reused")
    parser.add_argument("--out", type=Path, default=EVIDENCE, help="where the figures go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=DemoConfig().epochs)
    parser.add_argument("--depth", type=int, default=DemoConfig().depth)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    config = replace(DemoConfig(), epochs=arguments.epochs, depth=arguments.depth)
    data, rows, records = digits(), [], []
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=arguments.seeds * len(arguments.variants) * config.epochs)
        for seed in range(arguments.seeds):
            for variant in arguments.variants:
                place = arguments.runs / f"{variant}-seed{seed}"
                progress.update(task, description=place.name)
                if finished(place, variant, seed, config) is None:
                    for _ in train(place, variant, seed, config, data):
                        progress.advance(task)
                else:
                    progress.advance(task, config.epochs)
                record = finished(place, variant, seed, config)
                assert record is not None, f"{place} was written just now"
                records.append(record)
                rows += symmetry_rows(place, record)
                found = write(rows, records, arguments)  # after every run: an interruption keeps what is done
    for row in found:
        cells = (f"{name} {row[name]['mean']:.3f} ± {row[name]['spread']:.3f}" for name in row if name != "variant")
        print(f"{row['variant']:<15}" + ", ".join(cells))


if __name__ == "__main__":
    main()
