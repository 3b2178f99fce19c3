"""Semantic segmentation with a Segmenter: crops to train on, sliding windows and mean IoU to evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.distributed import gather
from acutance.lab.data.augment import normalise
from acutance.lab.data.imagenet import IMAGENET_MEAN, IMAGENET_STD
from acutance.lab.data.seeds import epoch_order
from acutance.lab.data.segmentation import IGNORED, SegmentationCrops, SegmentationSet, load_segmentation
from acutance.lab.data.stream import training_batches
from acutance.lab.tasks.base import BatchSlice, Task, epoch_steps, incidental, load_and_install, refuse_other_classes
from acutance.lab.tasks.windows import LONGEST, MULTI, SINGLE, View, WindowConfig, confusion, scores, segmented
from acutance.models import SegmenterConfig
from acutance.models.segmenter import Segmenter


@dataclass(frozen=True)
class SegmentationConfig:
    """Which images, which model, and how whole images are read. The mitigation is the model's.

    Crops to train on are as large as the model's `image_size`, taken at .5 to 2 times `windows.short_side`.
    """

    kind: ClassVar[str] = "segmentation"
    dataset: str
    model: SegmenterConfig
    data_dir: str | None = incidental(None)
    train_on: Literal["train", "all"] = "train"  # all includes the slice "val": for a last run, when nothing is chosen
    windows: WindowConfig = field(default_factory=WindowConfig)
    multi_scale: bool = True  # on the test set, score several scales and flips too, which takes many times as long
    encoder_weights: str | None = None  # of a classifier, e.g. DeiT's; a file that acutance.io.load_checkpoint reads
    workers: int = incidental(0)  # processes that decode and crop; 0 does it in this one


ADE20K = SegmentationConfig(dataset="ade20k", model=SegmenterConfig(num_classes=150))
CAMVID = SegmentationConfig(  # images of 360 × 480
    dataset="camvid",
    model=SegmenterConfig(num_classes=11, image_size=352),
    windows=WindowConfig(short_side=360, size=352, stride=320),
)


class SegmentationTask(Task[SegmentationConfig]):
    """Cross-entropy over the pixels that count; mean IoU in percent."""

    headline: ClassVar[str] = "miou"
    monitored_part: ClassVar[str | None] = "encoder"
    probe_samples: ClassVar[int] = 4

    def __init__(self, config: SegmentationConfig, *, seed: int, device: torch.device) -> None:
        super().__init__(config, seed=seed, device=device)
        self._train = self._images(config.train_on)
        refuse_other_classes(config.dataset, len(self._train.classes), config.model.num_classes)

    def _images(self, split: str) -> SegmentationSet:
        return load_segmentation(self.config.dataset, self.config.data_dir, cast(Any, split))

    def build_model(self) -> nn.Module:
        """The mitigation is installed in encoder and decoder."""
        chosen = self.config.model
        model = Segmenter(**replace(chosen, mitigation=None).to_dict())
        load_and_install(model.encoder, self.config.encoder_weights, chosen.mitigation)
        load_and_install(model.decoder, None, chosen.mitigation)
        return model

    def steps_per_epoch(self, batch_size: int) -> int:
        return epoch_steps(self.config.dataset, len(self._train), batch_size)

    def batches(self, batch_size: int, first_step: int, part: BatchSlice) -> Iterator[tuple[Tensor, Tensor]]:
        """Crops (rows, 3, size, size), normalised, and their classes (rows, size, size)."""
        short = self.config.windows.short_side
        crops = SegmentationCrops(self._train, self.config.model.image_size, scale=(LONGEST * short, short))
        made = training_batches(
            crops,
            partial(epoch_order, len(crops), self.seed),
            batch_size=batch_size,
            seed=self.seed,
            first_step=first_step,
            rows=part.rows(batch_size),
            workers=self.config.workers,
            device=self.device,
        )
        for images, labels in made:
            yield normalised(images), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the pixels of this slice that count, as the public code has it in every process."""
        images, labels = batch
        total = F.cross_entropy(model(images), labels, ignore_index=IGNORED, reduction="sum")
        mean: Tensor = total / (labels != IGNORED).sum().clamp(min=1)
        return mean

    def size(self, split: str) -> int:
        return len(self._images(split))

    def inputs(self, split: str, indices: Sequence[int]) -> Tensor:
        """The middle of each image, as large as a training crop."""
        images, size, middles = self._images(split), self.config.model.image_size, []
        for index in indices:
            image = images[index][0]
            top, left = (max(extent - size, 0) // 2 for extent in image.shape[1:])
            middle = normalised(image[:, top : top + size, left : left + size])
            middles.append(F.pad(middle, (0, size - middle.shape[2], 0, size - middle.shape[1])))
        return torch.stack(middles).to(self.device)

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        everywhere = "dataset", "windows.short_side", "windows.size", "windows.stride"
        return (*everywhere, "multi_scale") if split == "test" else everywhere

    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """Mean IoU and accuracies over sliding windows; on "test" with several scales and flips too, as `miou_ms`."""
        images = self._images(split)
        model.eval()
        found = self._scores(model, images, SINGLE)
        if split == "test" and self.config.multi_scale:
            found |= {f"{name}_ms": value for name, value in self._scores(model, images, MULTI).items()}
        return found

    def _scores(self, model: nn.Module, images: SegmentationSet, views: Sequence[View]) -> dict[str, float]:
        classes = self.config.model.num_classes
        total = torch.zeros(classes, classes, dtype=torch.int64)

        def read(index: int) -> Tensor:
            return normalised(images[index][0].to(self.device))

        for index, predicted in segmented(model, read, len(images), views, self.config.windows):
            total += confusion(predicted.cpu(), images[index][1], classes)
        return scores(torch.stack(gather(total)).sum(0))


def normalised(images: Tensor) -> Tensor:
    """(…, 3, height, width) in 0 … 255 as encoders pretrained on ImageNet expect it."""
    mean, std = (torch.tensor(values, device=images.device) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return normalise(images.float(), mean, std)
