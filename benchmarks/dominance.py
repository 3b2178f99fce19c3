"""Which family dominates I + H⊗A: Table 1 of https://arxiv.org/abs/2401.04301, at random initialisation and trained.

    python benchmarks/dominance.py random --device cuda --images-npz images.npz
    python benchmarks/dominance.py trained --seeds 5

`random`: ViT-B/16 as initialised (the paper: 100/0), on images from an .npz (array `images`, (n, 3, 224, 224), already
normalised) or, without one, on normal noise. `trained`: the demo's 12-layer ViT on the embedded digits, plain, ViT⁺
and ViT⁻, each explained on the test images before and after training. Both write a CSV, and a JSON with the
figures per layer and head, the hardware, the versions and the command, in docs/evidence; the files of an earlier call
are rewritten.
"""

import argparse
import csv
import json
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import acutance as ac
from acutance.data import Split, digits
from acutance.demo import DemoConfig, evaluate, new_model, train_epochs
from acutance.explain import Spectrum
from acutance.mitigations import parse
from acutance.models import ViT

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
VARIANTS = {"plain": None, "positive": "eigen:positive", "negative": "eigen:negative"}

Row = dict[str, Any]


def random_rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, Spectrum]]:
    images, source = load_images(arguments)
    name = "ViT-B/16" if arguments.dim == 768 else f"ViT of {arguments.dim} channels"
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = ac.models.deit_base(depth=arguments.depth, dim=arguments.dim, heads=arguments.heads)
        model = model.to(arguments.device)
        batches = images.split(arguments.batch)
        yield explained(model, batches, {"model": name, "state": "random", "seed": seed, "data": source})


def load_images(arguments: argparse.Namespace) -> tuple[Tensor, str]:
    if arguments.images_npz is None:
        noise = torch.randn(arguments.samples, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        return noise, "normal noise"
    with np.load(arguments.images_npz) as file:
        images = torch.from_numpy(np.ascontiguousarray(file["images"][: arguments.samples])).float()
    return images, arguments.images_npz.name


def trained_rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, Spectrum]]:
    train, test = (Split(s.images.to(arguments.device), s.labels.to(arguments.device)) for s in digits())
    config = demo_config(arguments)
    images = [batch for batch, _ in test.batches(arguments.batch)]
    images = images[: max(1, arguments.samples // arguments.batch)]
    for seed in range(arguments.seeds):
        for name, spec in arguments.variants.items():
            model = build(spec, seed, config).to(arguments.device)
            about = {"model": name, "mitigation": spec, "seed": seed, "data": "digits, test images"}
            yield explained(model, images, {**about, "state": "random"})
            start = time.perf_counter()
            for _ in train_epochs(model, train, config, torch.Generator().manual_seed(seed)):
                pass
            trained = {"state": "trained", "epochs": config.epochs, "train_seconds": time.perf_counter() - start}
            yield explained(model, images, {**about, **trained, "accuracy": evaluate(model, test)})


def demo_config(arguments: argparse.Namespace) -> DemoConfig:
    return replace(DemoConfig(), depth=arguments.depth, epochs=arguments.epochs)


def build(spec: str | None, seed: int, config: DemoConfig) -> ViT:
    """The demo's model; a mitigation is built for the widened weights, as for a new layer."""
    model = new_model(config, seed)
    if spec is not None:
        for site in ac.sites.find(model):
            site.install(parse(spec).for_layer(site.shape()))
    return model


def explained(model: ViT, batches: Sequence[Tensor], about: Row) -> tuple[Row, Spectrum]:
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spectrum = ac.explain(model, batches, progress=False)
    branch, block = spectrum.outcome("branch"), spectrum.outcome("block")
    figures = {
        "smoothing_percent": 100 * spectrum.share("whole").smoothing,
        "sharpening_percent": 100 * spectrum.share("whole").sharpening,
        "smoothing_percent_by_head": 100 * spectrum.share("heads").smoothing,
        "sharpening_percent_by_head": 100 * spectrum.share("heads").sharpening,
        "negative_share": float(np.mean([layer.negative_share for layer in spectrum.layers])),
        "lowest_eigenvalue": min(float(layer.spectrum.real.min()) for layer in spectrum.layers),
        "fell_branch": branch.fell,
        "fell_block": block.fell,
        "agreement_branch": branch.agreement,
        "base_rate_branch": branch.base_rate,
        "agreement_block": block.agreement,
        "base_rate_block": block.base_rate,
        "samples": spectrum.context["samples"],
        "explain_seconds": time.perf_counter() - start,
        "warnings": "; ".join(str(warning.message) for warning in caught),
    }
    empty = {"mitigation": None, "epochs": None, "train_seconds": None, "accuracy": None}
    return {**empty, **about, **figures}, spectrum


def by_layer(spectrum: Spectrum) -> list[Row]:
    """Verdict, dominance and outcome of every layer, without the eigenvalues."""
    return [
        {"layer": s.layer, "verdict": s.verdict, "quantiles": s.quantiles, "symmetry": s.symmetry}
        | ({} if s.dominance is None else {"dominance": s.dominance.to_dict()})
        for s in spectrum.layers
    ]


def show(row: Row) -> None:
    print(
        f"{row['model']:<12}{row['state']:<9}seed {row['seed']}: {row['smoothing_percent']:.2f}/"
        f"{row['sharpening_percent']:.2f} % (by head {row['smoothing_percent_by_head']:.2f}/"
        f"{row['sharpening_percent_by_head']:.2f}), agreement across the branch {row['agreement_branch']:.1%} "
        f"(base {row['base_rate_branch']:.1%}), {row['explain_seconds']:.0f} s"
        + ("" if row["accuracy"] is None else f", accuracy {row['accuracy']:.2f} %")
    )


def pooled(rows: list[Row], where: str) -> dict[str, float]:
    """Agreement over all trained models together, where the prediction differs, and what always guessing one scores."""
    trained = [row for row in rows if row["state"] == "trained"]
    fell = float(np.mean([row[f"fell_{where}"] for row in trained]))
    agreement = float(np.mean([row[f"agreement_{where}"] for row in trained]))
    return {"agreement": agreement, "base_rate": max(fell, 1 - fell)}


def write(rows: list[Row], layers: list[list[Row]], arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    context = {
        "command": shlex.join(["python", "benchmarks/dominance.py", *sys.argv[1:]]),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "versions": {"acutance": ac.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "demo": asdict(demo_config(arguments)) if arguments.which == "trained" else None,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"dominance-{arguments.which}"
    runs = [{**row, "layers": found} for row, found in zip(rows, layers, strict=True)]
    path.with_suffix(".json").write_text(json.dumps({**context, "runs": runs}, indent=1, ensure_ascii=False))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def variants(text: str) -> dict[str, str | None]:
    """`plain,negative=eigen:negative;spectrum=bounded`: commas inside a spec are written as semicolons."""
    pairs = (item.partition("=") for item in text.split(","))
    return {name: spec.replace(";", ",") or VARIANTS[name] for name, _, spec in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["random", "trained"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, help="images read; default: 64 random, all 364 test images trained")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images-npz", type=Path, help="random: real images in place of noise")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768, help="random only")
    parser.add_argument("--heads", type=int, default=12, help="random only")
    parser.add_argument("--epochs", type=int, default=DemoConfig().epochs, help="trained only")
    parser.add_argument("--variants", type=variants, default=VARIANTS, help=variants.__doc__)
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    arguments.samples = arguments.samples or {"random": 64, "trained": 10**6}[arguments.which]
    rows, layers = [], []
    for row, spectrum in {"random": random_rows, "trained": trained_rows}[arguments.which](arguments):
        show(row)
        rows.append(row)
        layers.append(by_layer(spectrum))
        write(rows, layers, arguments)  # after every run: an interruption keeps what is done
    if arguments.which == "trained":
        for where in ("branch", "block"):
            found = pooled(rows, where)
            print(f"all trained, {where}: agreement {found['agreement']:.1%}, base rate {found['base_rate']:.1%}")


if __name__ == "__main__":
    main()
