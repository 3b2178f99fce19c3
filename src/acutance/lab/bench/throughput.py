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
from acutance.lab.train.config import Config
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
        yield [{**row, **_per_second(row, batch)} for row in rows]


def candidates(batch: int, settings: Settings) -> list[Candidate]:
    """Plain and with the term; on the CPU nothing can be recorded."""
    ways = ((True, False) if batch == LAUNCHED else (True,)) if settings.on_gpu else (False,)
    return [
        Candidate(
            variant,
            partial(end_to_end, configuration(batch, spec, recorded=recorded, settings=settings), settings),
            "recorded" if recorded else "launched",
            baseline=spec is None,
            static=recorded,
        )
        for recorded in ways
        for variant, spec in (("plain ViT", None), ("NeuTRENO", NEUTRENO))
    ]


def _per_second(row: Row, batch: int) -> Row:
    return {"images_per_s": f"{batch / float(row['ms']) * 1e3:.0f}"} if "ms" in row else {}


def configuration(batch: int, spec: str | None, *, recorded: bool, settings: Settings) -> Config:
    """The recipe's, at another batch size."""
    recipe = recipes.load("cifar100")
    model = replace(recipe.task.model, mitigation=spec, **({} if settings.on_gpu else TOY))
    loop = replace(recipe.loop, batch_size=batch, graph=recorded)
    task = replace(recipe.task, model=model)
    if not settings.on_gpu:
        loop, task = replace(loop, compile=False, precision="fp32"), replace(task, compile_augment=False)
    return replace(recipe, task=task, loop=loop)


def end_to_end(config: Config, settings: Settings) -> Step:
    """A step of training on random images; what they show makes no difference to the time."""
    engine = Engine(replace(config.loop, strategy="single"), device=torch.device(settings.device).type)
    task = ClassificationTask(config.task, seed=0, device=engine.device, images=random_images(settings))
    stepper = TrainStep(config, engine, task)
    batches, numbers = stepper.batches(0), count()

    def step() -> None:
        stepper(next(numbers), next(batches), RATE)

    return step


def random_images(settings: Settings) -> Images:
    """As many as CIFAR-100 has, of its size and classes."""
    images = IMAGES if settings.on_gpu else 64
    generator = torch.Generator().manual_seed(0)
    return Images(
        "random images",
        torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(100, (images,), generator=generator),
        tuple(map(str, range(100))),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )
