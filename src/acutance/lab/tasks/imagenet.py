"""Image classification on ImageNet: decoded and cropped in worker processes, augmented further on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.lab.data.augment import DEIT, Augment, AugmentConfig
from acutance.lab.data.folder import (
    HELD_OUT_EVERY,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Crops,
    ImageFolder,
    refuse_empty_slice,
)
from acutance.lab.data.seeds import generator
from acutance.lab.data.shards import WebShards
from acutance.lab.data.stream import REPEATS, evaluation_batches, repeated, training_batches
from acutance.lab.data.subsets import SplitName, held_out
from acutance.lab.tasks.base import Share, Task
from acutance.lab.tasks.classification import build_vit, counts, mean_scores, soft_cross_entropy
from acutance.models import ViTConfig

EVALUATED_AT_ONCE = 256  # images in a forward pass of `evaluate`
PROBE_IMAGES = 64


@dataclass(frozen=True)
class ImageNetConfig:
    """Which images, which model, and how the images are augmented; the defaults are DeiT's."""

    kind: ClassVar[str] = "imagenet"
    model: ViTConfig
    data_dir: str | None = None  # with train/<class>/ and val/<class>/, or with a folder imagenet/ that has them
    shards: str | None = None  # instead of train/: tar files such as /data/imagenet-train-{000000..000146}.tar
    test_shards: str | None = None  # instead of val/
    train_on: Literal["train", "all"] = "train"  # all includes the slice "val": for a last run, when nothing is chosen
    held_out_every: int = HELD_OUT_EVERY  # one training image in so many of each class is the slice "val"
    augment: AugmentConfig = DEIT
    compile_augment: bool = False
    repeats: int = REPEATS  # times an image comes in a batch; an epoch then sees that much fewer of them
    weights: str | None = None  # start from these, e.g. to fine-tune; a file that acutance.io.load_checkpoint reads
    workers: int = 8  # processes that decode, for each process that trains

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise AcutanceError(f"task.repeats must be 1 or more, not {self.repeats}")
        if self.model.in_chans != 3:
            raise AcutanceError(f"ImageNet's images have 3 channels, task.model.in_chans is {self.model.in_chans}")


class ImageNetTask(Task[ImageNetConfig]):
    """Cross-entropy against soft targets; top-1 and top-5 accuracy in percent, and the plain cross-entropy."""

    headline: ClassVar[str] = "top1"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, config: ImageNetConfig, *, seed: int, device: torch.device) -> None:
        super().__init__(config, seed=seed, device=device)
        self._splits: dict[str, ImageFolder | WebShards] = {}
        self._images = load_imagenet(config, config.train_on)
        if config.train_on == "all":  # the slice is scored all the same, but not before some epochs are trained
            every = config.held_out_every
            refuse_empty_slice(held_out(self._images.labels, every), every, config.shards or config.data_dir)
        classes = config.model.num_classes
        self._augment = Augment(
            config.augment, classes=classes, mean=IMAGENET_MEAN, std=IMAGENET_STD, device=self.device
        )
        self._augmented: Any = torch.compile(self._augment) if config.compile_augment else self._augment

    def build_model(self) -> nn.Module:
        """The ViT of the configuration."""
        return build_vit(self.config.model, weights=self.config.weights)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Global batches in an epoch; repeats do not make it longer."""
        steps = len(self._images) // batch_size
        if not steps:
            raise AcutanceError(
                f"there are {len(self._images)} images to train on, fewer than a batch of {batch_size}: lower "
                "loop.batch_size"
            )
        return steps

    def batches(self, batch_size: int, first_step: int, share: Share) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented images and soft targets."""
        rows, size, step = share.rows(batch_size), self.config.model.image_size, first_step
        cropped = training_batches(
            Crops(self._images, size),
            lambda epoch: repeated(self._images.order(self.seed, epoch), batch_size, self.config.repeats),
            batch_size=batch_size,
            seed=self.seed,
            first_step=first_step,
            rows=rows,
            workers=self.config.workers,
            device=self.device,
        )
        for images, labels in cropped:
            draws = self._augment.draw(batch_size, generator(self.device, self.seed, step, batch_size))
            yield self._augmented(images, labels, draws.rows(rows))
            step += 1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy against the soft targets; of a distilled model, the mean over both heads."""
        images, targets = batch
        return soft_cross_entropy(model(images), targets)

    def probe(self) -> Tensor:
        """The first images of the slice "val"."""
        return next(self.inputs("val", list(range(min(PROBE_IMAGES, self.size("val"))))))

    def size(self, split: str) -> int:
        """How many images a split has."""
        return len(self._split(split))

    def inputs(self, split: str, indices: list[int]) -> Iterator[Tensor]:
        """Images of a split as the model takes them for evaluation, in batches."""
        for batch, _ in self._evaluated(self._split(split), indices):
            yield self._augment.plain(batch)

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        """The data, and which of them are held out."""
        return ("test_shards",) if split == "test" else ("shards", "held_out_every")

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """Top-1 and top-5 accuracy in percent, and the loss; the processes share the work, exactly."""
        images = self._split(split)
        chunks = torch.arange(len(images)).split(EVALUATED_AT_ONCE)
        rank, world = processes.rank_and_world_size()
        # Each process as often as the others: a sharded model needs all. Only last chunks are repeated for that.
        own = [min(first + rank, len(chunks) - 1) for first in range(0, len(chunks), world)]
        model.eval()
        batches = self._evaluated(images, torch.cat([chunks[index] for index in own]).tolist())
        found = {
            index: counts(model(self._augment.plain(batch)), labels)
            for index, (batch, labels) in zip(own, batches, strict=True)
        }
        return mean_scores(found, len(chunks), len(images))

    def _evaluated(self, images: ImageFolder | WebShards, indices: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        return evaluation_batches(
            Crops(images, self.config.model.image_size),
            batch_size=EVALUATED_AT_ONCE,
            indices=indices,
            workers=self.config.workers,
            device=self.device,
        )

    def _split(self, split: str) -> ImageFolder | WebShards:
        splits: dict[str, SplitName] = {"train": "train", "val": "val", "test": "test"}
        if split not in splits:
            raise AcutanceError(f"no split {split!r}; there are {', '.join(splits)}")
        if split not in self._splits:  # listing a million files takes a while
            self._splits[split] = load_imagenet(self.config, splits[split])
        return self._splits[split]


def load_imagenet(config: ImageNetConfig, split: SplitName) -> ImageFolder | WebShards:
    """A split from the tree of folders, or from shards where the configuration names them."""
    pattern = config.test_shards if split == "test" else config.shards
    if pattern is not None:
        return WebShards(pattern, split, every=config.held_out_every, classes=config.model.num_classes)
    if config.data_dir is None:
        raise AcutanceError("ImageNet is read from a folder: name it with --data-dir (data_dir=), or set task.shards")
    within = Path(config.data_dir) / "imagenet"  # beside other data sets
    found = ImageFolder(within if within.is_dir() else config.data_dir, split, every=config.held_out_every)
    if len(found.classes) != config.model.num_classes:
        raise AcutanceError(
            f"the data has {len(found.classes)} classes, the model {config.model.num_classes}: set "
            "task.model.num_classes"
        )
    return found
