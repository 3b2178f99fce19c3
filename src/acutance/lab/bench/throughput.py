"""Training end to end: images drawn, augmented, learnt from, by the loop's own step and the recipe for CIFAR-100."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from acutance.lab import recipes
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table
from acutance.lab.bench.steps import NEUTRENO
from acutance.lab.bench.timing import Candidate, Step, compare
from acutance.lab.data.images import Images
from acutance.lab.tasks.classification import ClassificationTask
from acutance.lab.train.engine import Engine
from acutance.lab.train.step import TrainStep

BATCHES = (256, 512, 1024, 2048)
LAUNCHED = 1024  # at this size without recording too, to see what that gives
IMAGES = 50_000
TOY = {"dim": 48, "depth": 2}
RATE = 1e-3


def tables(settings: Settings, batch: int) -> list[Table]:
    """At one size of the batch."""
    where, batch = ("ViT-Ti/4, 32×32", batch) if settings.on_gpu else ("ViT-Ti/4 at toy size", 8)
    return [Table(f"{where}, end to end, batch {batch}", partial(_rows, batch, settings))]


def _rows(batch: int, settings: Settings) -> Iterator[list[Row]]:
    for rows in compare(candidates(batch, settings), settings.pace(steps=20), settings.device):
        for row in (row for row in rows if "ms" in row):
            row["images_per_s"] = f"{batch / float(row['ms']) * 1e3:.0f}"
        yield rows


def candidates(batch: int, settings: Settings) -> list[Candidate]:
    """Plain and with the term; on the CPU nothing can be recorded."""
    ways = ((True, False) if batch == LAUNCHED else (True,)) if settings.on_gpu else (False,)
    return [
        Candidate(
            variant,
            partial(end_to_end, batch, spec, recorded, settings),
            "recorded" if recorded else "launched",
            baseline=spec is None,
            static=recorded,
        )
        for recorded in ways
        for variant, spec in (("plain ViT", None), ("NeuTRENO", NEUTRENO))
    ]


def end_to_end(batch: int, spec: str | None, recorded: bool, settings: Settings) -> Step:
    """A step of the recipe's training at this batch size, on random images of CIFAR-100's number and size."""
    recipe = recipes.load("cifar100")
    model = replace(recipe.task.model, mitigation=spec, **({} if settings.on_gpu else TOY))
    loop = replace(recipe.loop, batch_size=batch, graph=recorded, strategy="single")
    task = replace(recipe.task, model=model)
    if not settings.on_gpu:
        loop, task = replace(loop, compile=False, precision="fp32"), replace(task, compile_augment=False)
    config = replace(recipe, task=task, loop=loop)
    engine = Engine(loop, device=torch.device(settings.device).type)
    generator, number = torch.Generator().manual_seed(0), IMAGES if settings.on_gpu else 64
    pixels = torch.randint(256, (number, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(100, (number,), generator=generator)
    images = Images("random images", pixels, labels, tuple(map(str, range(100))), mean=(0.5,) * 3, std=(0.25,) * 3)
    stepper = TrainStep(config, engine, ClassificationTask(task, seed=0, device=engine.device, images=images))
    batches, numbers = stepper.batches(0), count()
    return lambda: stepper(next(numbers), next(batches), RATE)
