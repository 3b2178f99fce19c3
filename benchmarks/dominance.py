"""Which family dominates I + H⊗A: Table 1 of https://arxiv.org/abs/2401.04301, at random initialisation and trained.

    python benchmarks/dominance.py random --device cuda --images FOLDER
    python benchmarks/dominance.py trained --seeds 5

`random`: ViT-B/16 at initialisation (the paper: 100/0), on images of a folder or, without one, on normal noise. Images
are taken by name and cropped as DeiT is evaluated; their hashes are recorded. `trained`: the demo's 12-layer ViT on the
embedded digits, plain, ViT⁺ and ViT⁻, each explained on the test images before and after training. Both write a CSV and
a JSON (figures per layer and head, hardware, versions, command) into docs/evidence, replacing those of an earlier call.
"""

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

import acutance as ac
from acutance.explain import Outcome, Spectrum
from acutance.io import centre_crop, image_batches
from acutance.lab.bench.results import Row, write_record
from acutance.lab.data.imagenet import IMAGENET_MEAN, IMAGENET_STD
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.demo import demo_config, trained
from acutance.lab.files import digest
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train.provenance import made
from acutance.models import ViT

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
OUTCOMES = ("fell", "fell_if_smoothing", "rose_if_sharpening", "correlation", "agreement", "base_rate")
VARIANTS = {"plain": None, "positive": "eigen:positive", "negative": "eigen:negative"}


def random_rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, Spectrum]]:
    batches, source, arguments.hashes = load_images(arguments)
    name = "ViT-B/16" if arguments.dim == 768 else f"ViT of {arguments.dim} channels"
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = ac.models.deit_base(depth=arguments.depth, dim=arguments.dim, heads=arguments.heads)
        about = {"model": name, "state": "random", "seed": seed, "data": source}
        yield explained(model.to(arguments.device), batches, about)


def load_images(arguments: argparse.Namespace) -> tuple[Sequence[Tensor], str, dict[str, str] | None]:
    """Batches of images (n, 3, 224, 224), where they come from, and the SHA-256 of every file."""
    if arguments.images is None:
        noise = torch.randn(arguments.samples, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        return noise.split(arguments.batch), "normal noise", None
    prepare = centre_crop((224, 224), IMAGENET_MEAN, IMAGENET_STD, fraction=224 / 256)
    found = image_batches(arguments.images, prepare, batch=arguments.batch, limit=arguments.samples)
    hashes = {f.relative_to(arguments.images).as_posix(): digest(f) for f in found.samples}
    return found, f"{len(hashes)} images of a folder", hashes


def trained_rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, Spectrum]]:
    for seed in range(arguments.seeds):
        for name, spec in VARIANTS.items():
            config = demo_config(*changed(arguments), f"loop.seed={seed}", f"task.model.mitigation={spec}")
            task = ClassificationTask(config.task, seed=seed, device=torch.device(arguments.device))
            images = task.inputs("test", range(min(task.size("test"), arguments.samples))).split(arguments.batch)
            torch.manual_seed(mixed_seed(seed))  # as the loop does
            model = task.build_model().to(arguments.device)
            about = {"model": name, "mitigation": spec, "seed": seed, "data": "digits, test images"}
            yield explained(model, images, {**about, "state": "random"})
            start = time.perf_counter()
            with TemporaryDirectory() as folder:
                model, task = trained(config, Path(folder), arguments.device)
            about |= {"state": "trained", "epochs": arguments.epochs, "train_seconds": time.perf_counter() - start}
            about |= {"accuracy": task.evaluate(model, split="test")["top1"]}
            yield explained(model, images, about)


def changed(arguments: argparse.Namespace) -> list[str]:
    return [f"task.model.depth={arguments.depth}", f"loop.epochs={arguments.epochs}"]


def explained(model: ViT, batches: Sequence[Tensor], about: Row) -> tuple[Row, Spectrum]:
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spectrum = ac.explain(model, batches, progress=False)
    outcomes = {place: spectrum.outcome(place) for place in ("branch", "block")}
    figures = {
        "smoothing_percent": 100 * spectrum.share("whole").smoothing,
        "sharpening_percent": 100 * spectrum.share("whole").sharpening,
        "smoothing_percent_by_head": 100 * spectrum.share("heads").smoothing,
        "sharpening_percent_by_head": 100 * spectrum.share("heads").sharpening,
        "negative_share": float(np.mean([layer.negative_share for layer in spectrum.layers])),
        "lowest_eigenvalue": min(float(layer.spectrum.real.min()) for layer in spectrum.layers),
        **{f"{name}_{place}": getattr(found, name) for place, found in outcomes.items() for name in OUTCOMES},
        "samples": spectrum.context["samples"],
        "explain_seconds": time.perf_counter() - start,
        "warnings": "; ".join(str(warning.message) for warning in caught),
    }
    empty = dict.fromkeys(("mitigation", "epochs", "train_seconds", "accuracy"))
    return {**empty, **about, **figures}, spectrum


def by_layer(spectrum: Spectrum) -> list[Row]:
    """Every layer's family, dominance and outcome, without eigenvalues."""
    plain = spectrum.to_dict()["layers"]
    return [
        {"layer": s.layer, "family": s.family, "quantiles": s.quantiles, "symmetry": s.symmetry}
        | ({"dominance": found["dominance"]} if found.get("dominance") else {})
        for s, found in zip(spectrum.layers, plain, strict=True)
    ]


def show(row: Row) -> None:
    shown = "model state seed smoothing_percent sharpening_percent smoothing_percent_by_head agreement_branch accuracy"
    print(", ".join(f"{name} {row[name]}" for name in shown.split() if row[name] is not None))


def in_words(found: Outcome) -> str:
    """Prediction against measurement, over all trained models together, since their predictions differ."""
    return ", ".join(f"{name.replace('_', ' ')} {getattr(found, name):.3f}" for name in OUTCOMES[1:])


def write(rows: list[Row], layers: list[list[Row]], arguments: argparse.Namespace) -> None:
    trained = demo_config(*changed(arguments)).to_dict() if arguments.which == "trained" else None
    context = {**made("explained"), "device": arguments.device, "images": arguments.hashes, "demo": trained}
    runs = [{**row, "layers": found} for row, found in zip(rows, layers, strict=True)]
    write_record(arguments.out / f"dominance-{arguments.which}", rows, ".6g", {**context, "runs": runs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["random", "trained"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, help="images read; default: 64 random, all 364 test images trained")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=Path, help="random: a folder of images, with subfolders, instead of noise")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768, help="random only")
    parser.add_argument("--heads", type=int, default=12, help="random only")
    parser.add_argument("--epochs", type=int, default=12, help="trained only")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    parser.set_defaults(hashes=None)
    arguments = parser.parse_args()
    arguments.samples = arguments.samples or {"random": 64, "trained": 10**6}[arguments.which]
    rows, layers, trained = [], [], []
    for row, spectrum in {"random": random_rows, "trained": trained_rows}[arguments.which](arguments):
        show(row)
        rows.append(row)
        layers.append(by_layer(spectrum))
        trained += spectrum.layers if row["state"] == "trained" else ()
        write(rows, layers, arguments)  # after every run, so that an interruption keeps the results
    if arguments.which == "trained":
        for where in ("branch", "block"):
            print(f"all trained, {where}: {in_words(Spectrum(tuple(trained)).outcome(where))}")


if __name__ == "__main__":
    main()
