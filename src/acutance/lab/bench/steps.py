"""The cost of NeuTRENO and of a chosen spectrum: training steps and inference against plain ViTs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from acutance.lab.bench.floor import of_vit, with_floor
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table, inference_step, training_step, unfused
from acutance.lab.bench.timing import Candidate, Step, compare
from acutance.models import ViT, deit_tiny, vit_tiny_cifar

NEUTRENO = "neutreno:0.6"
TOY: dict[str, Any] = {"image_size": 8, "patch_size": 4, "dim": 48, "depth": 2, "heads": 3, "num_classes": 10}
TOY_TIMM = {"img_size": 8, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
NO_TIMM = "timm is not installed: the baseline is our own plain ViT"
# Bases of a spectrum. Those that call a library come last: a failed capture into a CUDA graph may break others.
BASES = ("polar", "cayley", "householder", "qr")


@dataclass(frozen=True)
class Shape:
    """A model, and the batch it is timed on."""

    title: str
    ours: Callable[..., ViT]
    timm: dict[str, Any]  # arguments of timm.create_model
    image_size: int
    classes: int
    batch: int


TIMM_32 = {"model_name": "vit_tiny_patch16_224", "img_size": 32, "patch_size": 4, "num_classes": 100}
SHAPES = {
    "steps-32": Shape("ViT-Ti/4, 32×32", vit_tiny_cifar, TIMM_32, 32, 100, batch=1024),
    "steps-224": Shape("DeiT-Ti/16, 224×224", deit_tiny, {"model_name": "deit_tiny_patch16_224"}, 224, 1000, batch=512),
}


def shape_for(name: str, settings: Settings) -> Shape:
    """A shape by name; on the CPU at toy size."""
    shape = SHAPES[name]
    if settings.on_gpu:
        return shape
    title, timm = f"{shape.title.split(',')[0]} at toy size", {"model_name": shape.timm["model_name"], **TOY_TIMM}
    return Shape(title, partial(ViT, **TOY), timm, TOY["image_size"], TOY["num_classes"], batch=4)


def tables(settings: Settings, name: str) -> list[Table]:
    """Training and inference at one size."""
    shape = shape_for(name, settings)
    return [
        Table(f"{shape.title}, batch {shape.batch}, {what}", partial(_rows, shape, what == "training", settings))
        for what in ("training", "inference")
    ]


def eigen_tables(settings: Settings) -> list[Table]:
    """A training step of ViT-Ti⁻ against ViT-Ti; `benchmarks/eigen_step.py` times all bases without graphs too."""
    shape = shape_for("steps-32", settings)
    title = f"ViT-Ti⁻ against ViT-Ti: {shape.title}, batch {shape.batch}, training"
    return [Table(title, lambda: compare(eigen_candidates(shape, settings), settings.pace(), settings.device))]


def eigen_candidates(shape: Shape, settings: Settings) -> list[Candidate]:
    """The plain model first; all in the mode with the least overhead."""
    specs = (None, *(f"eigen:negative,basis={basis}" for basis in BASES))
    return [
        candidate
        for spec in specs
        for candidate in in_modes(
            spec or "plain ViT",
            partial(step_of, partial(shape.ours, mitigation=spec), shape, True, settings),
            settings.modes[-1:],
            baseline=spec is None,
        )
    ]


def _rows(shape: Shape, training: bool, settings: Settings) -> Iterator[list[Row]]:
    has_timm = find_spec("timm") is not None
    kernels = of_vit(shape.ours(), shape.batch, settings.dtype.itemsize, training=training)
    found = compare(candidates(shape, training, settings, timm=has_timm), settings.pace(), settings.device)
    for rows in with_floor(kernels, found, settings):
        if not has_timm:
            rows[0]["note"] = "; ".join(filter(None, [rows[0].get("note"), NO_TIMM]))
        yield rows


def candidates(shape: Shape, training: bool, settings: Settings, *, timm: bool) -> list[Candidate]:
    """The plain models first; a variant with one row is timed in the mode with the least overhead."""
    modes, least = settings.modes, settings.modes[-1:]
    neutreno = partial(shape.ours, mitigation=NEUTRENO)
    plain = partial(timm_model, shape) if timm else shape.ours

    def made(build: Callable[[], nn.Module]) -> Callable[[str], Step]:
        return partial(step_of, build, shape, training, settings)

    return [
        *in_modes("timm's ViT" if timm else "plain ViT", made(plain), settings.baseline_modes, baseline=True),
        *(in_modes("plain ViT", made(shape.ours), least) if timm else []),
        *in_modes("NeuTRENO", made(neutreno), modes),
        *in_modes("NeuTRENO, tokens in bfloat16 between blocks", made(partial(neutreno, stream="autocast")), least),
        *in_modes("NeuTRENO, no fused kernel", lambda mode: unfused(made(neutreno)(mode)), least),
    ]


def in_modes(
    variant: str, made: Callable[[str], Step], modes: Sequence[str], *, baseline: bool = False
) -> list[Candidate]:
    """A row for each mode of `torch.compile`."""
    return [Candidate(variant, partial(made, mode), mode, baseline, static=mode in WITH_GRAPHS) for mode in modes]


def timm_model(shape: Shape) -> nn.Module:
    """The baseline."""
    import timm

    model: nn.Module = timm.create_model(**shape.timm)
    return model


def step_of(build: Callable[[], nn.Module], shape: Shape, training: bool, settings: Settings, mode: str) -> Step:
    """Training or inference of a classifier on random images."""
    images = torch.randn(shape.batch, 3, shape.image_size, shape.image_size, device=settings.device)
    if not training:
        return inference_step(build(), [images], mode=mode, dtype=settings.dtype)
    labels = torch.randint(shape.classes, (shape.batch,), device=settings.device)
    loss = partial(_cross_entropy, labels)
    return training_step(build(), [images], loss, mode=mode, dtype=settings.dtype)


def _cross_entropy(labels: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels)
