"""Image classification on ImageNet: decoded and cropped in worker processes, augmented further on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data import imagenet as data
from acutance.lab.data.augment import DEIT, AugmentConfig
from acutance.lab.data.imagenet import IMAGENET_MEAN, IMAGENET_STD, Crops, ImageFolder, WebShards
from acutance.lab.data.source import SplitName
from acutance.lab.data.stream import REPEATS, evaluation_batches, repeated, training_batches
from acutance.lab.tasks.base import check_ranges, incidental, refuse_other_classes
from acutance.lab.tasks.classification import Classification
from acutance.models import ViTConfig


@dataclass(frozen=True)
class ImageNetConfig:
    """Which images, which model, and how the images are augmented; the defaults are DeiT's."""

    kind: ClassVar[str] = "imagenet"
    model: ViTConfig
    data_dir: str | None = incidental(None)  # with train/<class>/, val/<class>/, or a folder imagenet/ that has them
    shards: str | None = incidental(None)  # instead of train/: tar files like /data/imagenet-train-{000000..000146}.tar
    test_shards: str | None = incidental(None)  # instead of val/
    train_on: Literal["train", "all"] = "train"  # all includes the slice "val": for a last run, after all choices
    held_out_every: int = data.HELD_OUT_EVERY  # one in this many training images of each class is in the slice "val"
    augment: AugmentConfig = DEIT
    compile_augment: bool = incidental(False)
    repeats: int = REPEATS  # how often an image is in a batch; an epoch sees that many times fewer images
    weights: str | None = None  # start from these, e.g. to fine-tune; a file that acutance.io.load_checkpoint reads
    workers: int = incidental(8)  # decoding processes per training process

    def __post_init__(self) -> None:
        check_ranges("task", self, {"1 or more": "repeats"})
        if self.model.in_chans != 3:
            raise AcutanceError(f"ImageNet's images have 3 channels, task.model.in_chans is {self.model.in_chans}")


class ImageNetTask(Classification[ImageNetConfig]):
    """Images in files."""

    evaluated_at_once: ClassVar[int] = 256

    def __init__(self, config: ImageNetConfig, *, seed: int, device: torch.device) -> None:
        super().__init__(config, seed=seed, device=device)
        self._train = self._images(config.train_on)
        if config.train_on == "all":  # refuse an empty slice "val" now, not after some epochs
            data.choose(self._train.labels, "val", config.held_out_every, config.shards or str(config.data_dir))
        self._make_augment(config.model.num_classes, IMAGENET_MEAN, IMAGENET_STD)

    def _rows(self, batch_size: int, first_step: int, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        def order(epoch: int) -> Tensor:
            return repeated(self._train.order(self.seed, epoch), batch_size, self.config.repeats)

        crops = Crops(self._train, self.config.model.image_size)
        how: dict[str, Any] = {"workers": self.config.workers, "device": self.device, "first_step": first_step}
        return training_batches(crops, order, batch_size=batch_size, seed=self.seed, rows=rows, **how)

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        return ("test_shards",) if split == "test" else ("shards", "held_out_every")

    def _load(self, split: str) -> ImageFolder | WebShards:
        if split not in get_args(SplitName):
            raise AcutanceError(f"no split {split!r}; there are train, val, test")
        return load_imagenet(self.config, cast(Any, split))

    def _read(self, images: ImageFolder | WebShards, indices: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        crops = Crops(images, self.config.model.image_size)
        how: dict[str, Any] = {"workers": self.config.workers, "device": self.device}
        return evaluation_batches(crops, batch_size=self.evaluated_at_once, indices=indices, **how)


def load_imagenet(config: ImageNetConfig, split: SplitName) -> ImageFolder | WebShards:
    """A split, from shards if the configuration names them, otherwise from the tree of folders."""
    pattern = config.test_shards if split == "test" else config.shards
    if pattern is not None:
        return WebShards(pattern, split, every=config.held_out_every, classes=config.model.num_classes)
    if config.data_dir is None:
        raise AcutanceError("ImageNet is read from a folder: name it with --data-dir (data_dir=), or set task.shards")
    within = Path(config.data_dir) / "imagenet"  # beside other data sets
    found = ImageFolder(within if within.is_dir() else config.data_dir, split, every=config.held_out_every)
    refuse_other_classes("the data", len(found.classes), config.model.num_classes)
    return found
