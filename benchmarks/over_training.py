"""How training changes H and the affinities: small ViTs on the embedded digits, saved after every epoch.

    python benchmarks/over_training.py --seeds 5
    acutance lab kernel over-training/softmax-seed* over-training/symmetric-seed* --out docs/evidence/kernel

Trains the demo's 12-layer ViT with softmax attention from the demo's initialisation and from DeiT's smaller one
(σ = 0.02), with symmetric attention, and steered (ViT⁺, ViT⁻). From the checkpoints it reads how symmetric every
layer's H is (`explain.symmetry_over`) and how far it has moved. One run takes about a minute on a CPU core. You can
stop it and start it again: runs in --runs are reused or resume. The figures go to --out as symmetry.csv and
symmetry.json; `acutance lab kernel` reads the same runs.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from acutance.explain import symmetry_over
from acutance.explain.weights import Norm
from acutance.lab.bench.results import Row, write_record
from acutance.lab.demo import demo_config, trained
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train import Config, Run
from acutance.lab.train.checkpointer import checkpoint_paths, read_checkpoint
from acutance.lab.train.provenance import made
from acutance.sites import find

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "symmetry"
# How each variant differs from the demo's training.
VARIANTS: dict[str, list[str]] = {
    "softmax": [],
    "softmax-small": ["task.xavier=false"],
    "symmetric": ["task.model.attention=symmetric"],
    "plus": ["task.model.mitigation=eigen:positive"],
    "minus": ["task.model.mitigation=eigen:negative"],
}
# The symmetry of H by itself, and of H diag(γ) with the weight γ of the norm before it.
NORMS: dict[str, Norm] = {"symmetry": "ignore", "symmetry_with_norm": "fold"}


def record_of(place: Path, variant: str, seed: int, config: Config) -> Row:
    """Train or resume one model, with a checkpoint before the first epoch and after every epoch."""
    model, task = trained(config, place)
    accuracy = task.evaluate(model, split="test")["top1"]
    return {"variant": variant, "seed": seed, "accuracy": accuracy, "epochs": int(config.loop.epochs)}


def symmetry_rows(place: Path, record: Row, config: Config) -> list[Row]:
    models = [model_at(path, config) for path in reversed(checkpoint_paths(Run(place).checkpoints))]
    about = {key: record[key] for key in ("variant", "seed")}
    found = {name: symmetry_over(models, norm=norm) for name, norm in NORMS.items()} | {"moved": moved(models)}
    return [
        {**about, "epoch": epoch, "layer": layer, **{name: table[epoch, layer - 1] for name, table in found.items()}}
        for epoch in range(len(models))
        for layer in range(1, config.task.model.depth + 1)
    ]


def model_at(checkpoint: Path, config: Config) -> torch.nn.Module:
    """The model at a checkpoint."""
    model = ClassificationTask(config.task, seed=0, device=torch.device("cpu")).bare_model()
    model.load_state_dict(read_checkpoint(checkpoint)[0]["model.safetensors"])
    return model


@torch.no_grad()
def moved(models: list[torch.nn.Module]) -> NDArray[np.float64]:
    """‖H − H₀‖/‖H₀‖ (checkpoints, layers), with H₀ from the first checkpoint."""
    branches = [torch.stack([s.projection_weight() @ s.value_weight() for s in find(model)]) for model in models]
    size = branches[0].norm(dim=(1, 2))
    return torch.stack([(H - branches[0]).norm(dim=(1, 2)) / size for H in branches]).double().numpy()


def summary(rows: list[Row], records: list[Row]) -> list[Row]:
    """Per variant, the mean and spread over seeds of accuracy, and of means over layers before and after training."""
    result = []
    for variant in dict.fromkeys(record["variant"] for record in records):
        done = [record for record in records if record["variant"] == variant]
        readings = {"accuracy": [record["accuracy"] for record in done]}
        for name in NORMS:
            readings[f"{name}_start"] = [over_layers(rows, record, 0, name) for record in done]
        for name in (*NORMS, "moved"):
            readings[f"{name}_end"] = [over_layers(rows, record, record["epochs"], name) for record in done]
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
        **made("finished"),
        "config": demo_config(*chosen(arguments)).to_dict(),
        "variants": VARIANTS,
        "symmetry": "cosine between H and its transpose; with_norm: the pre-norm's weight folded in",
        "moved": "how far H is from what it was before training, relative to its norm then",
        "summary": found,
    }
    write_record(arguments.out / "symmetry", rows, ".5f", body)
    return found


def chosen(arguments: argparse.Namespace) -> list[str]:
    """The changes for a checkpoint after every epoch of 22 steps, keeping all of them."""
    kept = ["loop.checkpoint_every=22", "loop.keep_last=1000"]
    return [f"task.model.depth={arguments.depth}", f"loop.epochs={arguments.epochs}", *kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("over-training"), help="runs, which are reused")
    parser.add_argument("--out", type=Path, default=EVIDENCE, help="where the figures go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    rows, records = [], []
    wanted = [(seed, variant) for seed in range(arguments.seeds) for variant in arguments.variants]
    for seed, variant in track(wanted, console=Console(stderr=True)):
        config = demo_config(*chosen(arguments), f"loop.seed={seed}", *VARIANTS[variant])
        place = arguments.runs / f"{variant}-seed{seed}"
        records.append(record_of(place, variant, seed, config))
        rows += symmetry_rows(place, records[-1], config)
        found = write(rows, records, arguments)  # after every run, so that an interruption keeps the results
    for row in found:
        cells = (f"{name} {row[name]['mean']:.3f} ± {row[name]['spread']:.3f}" for name in row if name != "variant")
        print(f"{row['variant']:<15}" + ", ".join(cells))


if __name__ == "__main__":
    main()
