"""What NeuTRENO costs: the training step and inference against the best plain ViT of timm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table
from acutance.lab.bench.step_floor import StepFloor, of_vit
from acutance.lab.bench.timing import Candidate, Step, compare
from acutance.lab.bench.work import inference_step, training_step, unfused
from acutance.models import ViT, deit_tiny, vit_tiny_cifar

NEUTRENO = "neutreno:0.6"
TOY: dict[str, Any] = {"image_size": 8, "patch_size": 4, "dim": 48, "depth": 2, "heads": 3, "num_classes": 10}
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
NO_TIMM = "timm is not installed: the baseline is our own plain ViT"

Build = Callable[[], nn.Module]
Make = Callable[[nn.Module, "Shape", Settings, str], Step]
Wrap = Callable[[Step], Step]


@dataclass(frozen=True)
class Shape:
    """A model, and the batch it is timed on."""

    title: str
    ours: Callable[..., ViT]
    timm: dict[str, Any]  # arguments of timm.create_model
    image_size: int
    classes: int
    batch: int


SHAPES = {
    "steps-32": Shape(
        "ViT-Ti/4, 32×32",
        vit_tiny_cifar,
        {"model_name": "vit_tiny_patch16_224", "img_size": 32, "patch_size": 4, "num_classes": 100},
        image_size=32,
        classes=100,
        batch=1024,
    ),
    "steps-224": Shape(
        "DeiT-Ti/16, 224×224",
        deit_tiny,
        {"model_name": "deit_tiny_patch16_224"},
        image_size=224,
        classes=1000,
        batch=512,
    ),
}
TOY_TIMM = {"img_size": 8, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}


def tables(settings: Settings, name: str) -> list[Table]:
    """Training and inference at one size."""
    shape = SHAPES[name] if settings.on_gpu else toy(SHAPES[name])
    return [
        Table(f"{shape.title}, batch {shape.batch}, {what}", partial(_rows, shape, make, settings))
        for what, make in (("training", training), ("inference", inference))
    ]


def toy(shape: Shape) -> Shape:
    """So small that a CPU runs it in no time."""
    return Shape(
        f"{shape.title.split(',')[0]} at toy size",
        partial(ViT, **TOY),
        {"model_name": shape.timm["model_name"], **TOY_TIMM},
        image_size=TOY["image_size"],
        classes=TOY["num_classes"],
        batch=4,
    )


def _rows(shape: Shape, make: Make, settings: Settings) -> Iterator[list[Row]]:
    has_timm = find_spec("timm") is not None
    floor = StepFloor(of_vit(shape.ours(), shape.batch), settings, training=make is training)
    for rows in compare(candidates(shape, make, settings, timm=has_timm), settings.pace(), settings.device):
        if not has_timm:
            rows[0]["note"] = "; ".join(filter(None, [rows[0].get("note"), NO_TIMM]))
        yield floor.beside(rows)


def candidates(shape: Shape, make: Make, settings: Settings, *, timm: bool) -> list[Candidate]:
    """The plain models first; what has one row only is timed in the mode with the least overhead."""
    modes, least = settings.modes, settings.modes[-1:]
    neutreno = partial(shape.ours, mitigation=NEUTRENO)

    def rows(
        variant: str, build: Build, modes: Sequence[str], wrap: Wrap = _as_it_is, **options: bool
    ) -> list[Candidate]:
        return in_modes(variant, lambda mode: wrap(make(build(), shape, settings, mode)), modes, **options)

    return [
        *(rows("timm's ViT", partial(timm_model, shape), settings.baseline_modes, baseline=True) if timm else []),
        *rows("plain ViT", shape.ours, least if timm else settings.baseline_modes, baseline=not timm),
        *rows("NeuTRENO", neutreno, modes),
        *rows("NeuTRENO, tokens in bfloat16 between blocks", partial(neutreno, stream="autocast"), least),
        *rows("NeuTRENO, no fused kernel", neutreno, least, wrap=unfused),
    ]


def in_modes(
    variant: str, made: Callable[[str], Step], modes: Sequence[str], *, baseline: bool = False
) -> list[Candidate]:
    """A row for each mode of `torch.compile`."""
    return [Candidate(variant, partial(made, mode), mode, baseline, static=mode in WITH_GRAPHS) for mode in modes]


def _as_it_is(step: Step) -> Step:
    return step


def timm_model(shape: Shape) -> nn.Module:
    """The baseline."""
    import timm

    model: nn.Module = timm.create_model(**shape.timm)
    return model


def _images(shape: Shape, settings: Settings) -> Tensor:
    return torch.randn(shape.batch, 3, shape.image_size, shape.image_size, device=settings.device)


def training(model: nn.Module, shape: Shape, settings: Settings, mode: str) -> Step:
    """Of a classifier on random images."""
    labels = torch.randint(shape.classes, (shape.batch,), device=settings.device)
    loss = partial(_cross_entropy, labels)
    return training_step(model, [_images(shape, settings)], loss, mode=mode, dtype=settings.dtype)


def _cross_entropy(labels: Tensor, scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels)


def inference(model: nn.Module, shape: Shape, settings: Settings, mode: str) -> Step:
    """The same images, without gradients."""
    return inference_step(model, [_images(shape, settings)], mode=mode, dtype=settings.dtype)
