"""The cost of NeuTRENO and of a chosen spectrum in a ViT: steps, end to end, augmentation, the paper's efficiency."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import count, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.lab import recipes
from acutance.lab.bench.floor import count_flops, of_vit, with_floor
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Candidate, Settings, Step, Table, compare, inference_step, training_step, unfused
from acutance.lab.data.augment import DEIT_SMALL_IMAGES, Augment, AugmentConfig
from acutance.lab.data.images import Images
from acutance.lab.data.seeds import generator
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train.engine import Engine
from acutance.lab.train.step import TrainStep
from acutance.mitigations import REGISTRY
from acutance.models import ViT, deit_tiny, vit_tiny_cifar

NEUTRENO = "neutreno:0.6"
TOY: dict[str, Any] = {"image_size": 8, "patch_size": 4, "dim": 48, "depth": 2, "heads": 3, "num_classes": 10}
TOY_TIMM = {"img_size": 8, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
NO_TIMM = "timm is not installed: the baseline is our own plain ViT"
# Bases of a spectrum. Those that call a library come last, since a failed capture of a CUDA graph may break others.
BASES = ("polar", "cayley", "householder", "qr", "inverse")
PLAIN = "normalise alone"
AUGMENTS = {
    PLAIN: AugmentConfig(),
    "crop and flip": AugmentConfig(crop_pad=4, flip=0.5),
    "all but RandAugment": replace(DEIT_SMALL_IMAGES, rand_layers=0),
    "DeiT": DEIT_SMALL_IMAGES,
}
BATCHES = (256, 512, 1024, 2048)  # end to end
LAUNCHED = 1024  # at this size also without a CUDA graph, to see its gain


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


def shape_for(name: str, settings: Settings, batch: int | None = None) -> Shape:
    """A shape by name, perhaps with another batch; at toy size on the CPU."""
    shape = SHAPES[name]
    if settings.on_gpu:
        return replace(shape, batch=batch or shape.batch)
    title, timm = f"{shape.title.split(',')[0]} at toy size", {"model_name": shape.timm["model_name"], **TOY_TIMM}
    return Shape(title, partial(ViT, **TOY), timm, TOY["image_size"], TOY["num_classes"], batch=4)


def tables(settings: Settings, name: str) -> list[Table]:
    """Training and inference at one size."""
    shape = shape_for(name, settings)
    title = f"{shape.title}, batch {shape.batch}, "
    return [(title + what, _rows(shape, what == "training", settings)) for what in ("training", "inference")]


def _rows(shape: Shape, training: bool, settings: Settings) -> Iterator[list[Row]]:
    has_timm = find_spec("timm") is not None
    kernels = of_vit(shape.ours(), shape.batch, settings.dtype.itemsize, training=training)
    found = compare(candidates(shape, training, settings, timm=has_timm), settings.pace(), settings.device)
    for first, *others in with_floor(kernels, found, settings):
        note = {} if has_timm else {"note": "; ".join(filter(None, [first.get("note"), NO_TIMM]))}
        yield [{**first, **note}, *others]


def candidates(shape: Shape, training: bool, settings: Settings, *, timm: bool) -> list[Candidate]:
    """The plain models first. A variant with only one row is timed in the mode with the least overhead."""
    modes, least = settings.modes, settings.modes[-1:]
    every = (*modes, "max-autotune") if settings.max_autotune and settings.on_gpu else modes
    neutreno = partial(shape.ours, mitigation=NEUTRENO)
    plain = partial(timm_model, shape) if timm else shape.ours

    def made(build: Callable[[], nn.Module]) -> Callable[[str], Step]:
        return partial(step_of, build, shape, training, settings)

    return [
        *in_modes("timm's ViT" if timm else "plain ViT", made(plain), every, baseline=True),
        *(in_modes("plain ViT", made(shape.ours), least) if timm else []),
        *in_modes("NeuTRENO", made(neutreno), modes),
        *in_modes("NeuTRENO, tokens in bfloat16 between blocks", made(partial(neutreno, stream="autocast")), least),
        *in_modes("NeuTRENO, no fused kernel", lambda mode: unfused(made(neutreno)(mode)), least),
    ]


def in_modes(
    variant: str, made: Callable[[str], Step], modes: Sequence[str], *, baseline: bool = False
) -> list[Candidate]:
    """A candidate for each mode of `torch.compile`."""
    return [Candidate(variant, partial(made, mode), mode, baseline, static=mode in WITH_GRAPHS) for mode in modes]


def timm_model(shape: Shape) -> nn.Module:
    """timm's model of this shape."""
    import timm

    model: nn.Module = timm.create_model(**shape.timm)
    return model


def step_of(build: Callable[[], nn.Module], shape: Shape, training: bool, settings: Settings, mode: str) -> Step:
    """Training or inference of a classifier on random images."""
    images, labels = classified(shape, settings)
    if not training:
        return inference_step(build(), [images], mode=mode, dtype=settings.dtype)
    loss = partial(F.cross_entropy, target=labels)
    return training_step(build(), [images], loss, mode=mode, dtype=settings.dtype)


def classified(shape: Shape, settings: Settings) -> tuple[Tensor, Tensor]:
    """A batch of random images, and their classes."""
    images = torch.randn(shape.batch, 3, shape.image_size, shape.image_size, device=settings.device)
    return images, torch.randint(shape.classes, (shape.batch,), device=settings.device)


def eigen_tables(settings: Settings) -> Iterator[Table]:
    """A training step of ViT-Ti⁻ against ViT-Ti in every mode; the mode with the least overhead comes first."""
    shape = shape_for("steps-32", settings)
    for mode in settings.modes[::-1]:
        found = []
        for spec in (None, *(f"eigen:negative,basis={basis}" for basis in BASES)):
            made = partial(step_of, partial(shape.ours, mitigation=spec), shape, True, settings)
            found += in_modes(spec or "plain ViT", made, [mode], baseline=spec is None)
        title = f"ViT-Ti⁻ against ViT-Ti: {shape.title}, batch {shape.batch}, training, {mode}"
        yield title, compare(found, settings.pace(), settings.device)


def remedy_tables(settings: Settings) -> Iterator[Table]:
    """Every remedy with its default options in DeiT-Ti, not compiled and by torch's attention, as in most models."""
    shape = shape_for("steps-224", settings, batch=256)
    names = [name for name in REGISTRY if name not in ("none", "eigen")]
    for what in ("training", "inference"):
        found = []
        for spec in (None, *names):
            step = partial(step_of, partial(shape.ours, mitigation=spec), shape, what == "training", settings, "eager")
            found.append(Candidate(spec or "plain ViT", lambda step=step: unfused(step()), "eager", spec is None))  # type: ignore[misc]
        title = f"remedies in {shape.title}, batch {shape.batch}, {what}, not compiled, by SDPA"
        yield title, compare(found, settings.pace(), settings.device)


def end_to_end_tables(settings: Settings, batch: int) -> list[Table]:
    """The recipe for CIFAR-100 by the loop's own step: draw images, augment them, train on them."""
    batch = batch if settings.on_gpu else 8
    rows = _image_rows(end_to_end_candidates(batch, settings), batch, settings)
    return [(f"{shape_for('steps-32', settings).title}, end to end, batch {batch}", rows)]


def _image_rows(candidates: Sequence[Candidate], batch: int, settings: Settings) -> Iterator[list[Row]]:
    for rows in compare(candidates, settings.pace(steps=20), settings.device):
        for row in (row for row in rows if "ms" in row):
            row["images_per_s"] = f"{batch / float(row['ms']) * 1e3:.0f}"
        yield rows


def end_to_end_candidates(batch: int, settings: Settings) -> list[Candidate]:
    """Plain and NeuTRENO, with and without a CUDA graph; on the CPU only without."""
    ways = ((True, False) if batch == LAUNCHED else (True,)) if settings.on_gpu else (False,)
    found = []
    for recorded, spec in product(ways, (None, NEUTRENO)):
        variant, mode = "NeuTRENO" if spec else "plain ViT", "recorded" if recorded else "launched"
        make = partial(end_to_end_step, batch, spec, recorded, settings)
        found.append(Candidate(variant, make, mode, baseline=spec is None, static=recorded))
    return found


def end_to_end_step(batch: int, spec: str | None, recorded: bool, settings: Settings) -> Step:
    """A step of the recipe's training, on as many random images as CIFAR-100 has, of its size."""
    recipe = recipes.load("cifar100")
    toy = {} if settings.on_gpu else {"dim": 48, "depth": 2}
    loop = replace(recipe.loop, batch_size=batch, graph=recorded, strategy="single")
    task = replace(recipe.task, model=replace(recipe.task.model, mitigation=spec, **toy))
    if not settings.on_gpu:
        loop, task = replace(loop, compile=False, precision="fp32"), replace(task, compile_augment=False)
    engine = Engine(loop, device=torch.device(settings.device).type)
    learner = ClassificationTask(task, seed=0, device=engine.device, images=random_images(settings))
    stepper = TrainStep(replace(recipe, task=task, loop=loop), engine, learner)
    batches, numbers = stepper.batches(0), count()
    return lambda: stepper(next(numbers), next(batches), 1e-3)


def random_images(settings: Settings) -> Images:
    """Random bytes in the number and size of CIFAR-100's images, on the CPU."""
    draw, number = partial(torch.randint, generator=torch.Generator().manual_seed(0)), 50_000 if settings.on_gpu else 64
    pixels, labels = draw(256, (number, 3, 32, 32), dtype=torch.uint8), draw(100, (number,))
    return Images("random images", pixels, labels, tuple(map(str, range(100))), mean=(0.5,) * 3, std=(0.25,) * 3)


def augment_tables(settings: Settings) -> Iterator[Table]:
    """DeiT's augmentation on the device, and parts of it. Every step draws a new batch with new parameters."""
    batch = 1024 if settings.on_gpu else 16
    for mode in ("eager", "default")[: 1 + settings.on_gpu]:
        steps = {name: partial(augment_step, config, batch, settings, mode) for name, config in AUGMENTS.items()}
        candidates = [Candidate(name, make, mode, baseline=name == PLAIN) for name, make in steps.items()]
        yield f"augmentation of 32×32 images, batch {batch}, {mode}", _image_rows(candidates, batch, settings)


def augment_step(config: AugmentConfig, batch: int, settings: Settings, mode: str) -> Step:
    """A random batch of images that live on the device, augmented."""
    images = random_images(settings).to(torch.device(settings.device))
    augment = Augment(config, classes=100, mean=images.mean, std=images.std, device=settings.device)
    run: Any = augment if mode == "eager" else torch.compile(augment.__call__, fullgraph=True, dynamic=False, mode=mode)
    numbers = count()

    def step() -> object:
        random = generator(settings.device, 0, next(numbers))
        chosen = torch.randint(len(images), (batch,), generator=random, device=settings.device)
        return run(images.images[chosen], images.labels[chosen], augment.draw(batch, random))

    return step


def efficiency_tables(settings: Settings) -> list[Table]:
    """FLOPs, memory and time at inference without compiling (https://arxiv.org/abs/2312.00751, appendix G.4)."""
    shape = shape_for("steps-224", settings, batch=1024)  # so large that kernels take longer than their launches
    title = f"efficiency of {shape.title}, batch {shape.batch}, inference, not compiled"
    return [(title, _efficiency_rows(shape, settings))]


def _efficiency_rows(shape: Shape, settings: Settings) -> Iterator[list[Row]]:
    models = {"plain": shape.ours(), "NeuTRENO": shape.ours(mitigation=NEUTRENO)}
    images = torch.randn(shape.batch, 3, shape.image_size, shape.image_size, device=settings.device)
    steps = {name: partial(inference_step, model, [images], dtype=settings.dtype) for name, model in models.items()}
    candidates = [
        Candidate(name, lambda make=make: unfused(make()), "SDPA", baseline=name == "plain")  # type: ignore[misc]
        for name, make in steps.items()
    ]
    candidates += [Candidate(name, make, "fused kernel") for name, make in steps.items() if settings.on_gpu]
    counted: dict[str, Row] = {}
    for name, model in models.items():
        products, pointwise = count_flops(model.to(settings.device).eval(), images[:1])
        counted[name] = {"flops": products + pointwise, "flops_products": products, "flops_pointwise": pointwise}
        counted[name]["flops_ratio"] = f"{(products + pointwise) / counted['plain']['flops']:.7f}"
    for rows in compare(candidates, settings.pace(), settings.device):
        yield [{**row, **counted[row["variant"]]} for row in rows]
