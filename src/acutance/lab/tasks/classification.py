"""Image classification with a ViT, on images that live on the device and are augmented there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance import distributed as processes
from acutance import models
from acutance.errors import AcutanceError
from acutance.io.saving import load_checkpoint
from acutance.lab.data.augment import Augment, AugmentConfig
from acutance.lab.data.images import Images, load_images
from acutance.lab.data.seeds import epoch_order, generator
from acutance.lab.data.subsets import SplitName, fraction
from acutance.lab.studies.depth import draw_xavier
from acutance.lab.tasks.base import Share, Task
from acutance.mitigations import as_mitigation
from acutance.models import ViT, ViTConfig

EVALUATED_AT_ONCE = 1000  # images in a forward pass of `evaluate`
PROBE_IMAGES = 64


@dataclass(frozen=True)
class ClassificationConfig:
    """Which images, which model, and how the images are augmented. The mitigation is the model's."""

    kind: ClassVar[str] = "classification"
    dataset: str
    model: ViTConfig
    data_dir: str | None = None
    train_on: Literal["train", "all"] = "train"  # all includes the slice "val": for a last run, when nothing is chosen
    fraction: float = 1.0  # of the images trained on: the first of each class, see data.subsets
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    compile_augment: bool = False
    repeats: int = 1  # times an image comes in a batch, augmented anew (DeiT's repeated augmentation: 3)
    weights: str | None = None  # start from these, e.g. to fine-tune; a file that acutance.io.load_checkpoint reads
    xavier: bool = False  # start wider than DeiT's σ = 0.02, which is too narrow for few channels

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise AcutanceError(f"task.repeats must be 1 or more, not {self.repeats}")


def preset(name: str, **options: Any) -> ViTConfig:
    """The configuration of a model in `acutance.models`, such as vit_tiny_cifar, with these options changed."""
    build = getattr(models, name, None)
    if not name.startswith(("deit_", "vit_")) or build is None:
        raise AcutanceError(f"there is no model {name!r} in acutance.models")
    with torch.device("meta"):  # only its configuration is wanted
        config: ViTConfig = build(**options).config
    return config


class ClassificationTask(Task[ClassificationConfig]):
    """Cross-entropy against soft targets; top-1 and top-5 accuracy in percent, and the plain cross-entropy."""

    headline: ClassVar[str] = "top1"
    higher_is_better: ClassVar[bool] = True
    made_on_device: ClassVar[bool] = True

    def __init__(
        self, config: ClassificationConfig, *, seed: int, device: torch.device, images: Images | None = None
    ) -> None:
        """`images` to train on stand in for those of the configuration."""
        super().__init__(config, seed=seed, device=device)
        self._splits: dict[str, Images] = {}
        self._visits = -1, torch.empty(0)  # an epoch and its order, so that it is drawn once
        images = load_images(config.dataset, config.data_dir, config.train_on) if images is None else images
        if config.fraction < 1:
            images = images.subset(fraction(images.labels, config.fraction))
        _check_fits(config.model, images)
        self._images = images.to(device)
        self._augment = Augment(
            config.augment, classes=len(images.classes), mean=images.mean, std=images.std, device=device
        )
        self._augmented: Any = self._augment
        if config.compile_augment:
            # Never with inductor's CUDA graphs, which write every batch to the same place: one is made ahead.
            self._augmented = torch.compile(self._augment, options={"triton.cudagraphs": False})

    def build_model(self) -> nn.Module:
        """The ViT of the configuration."""
        return build_vit(self.config.model, weights=self.config.weights, xavier=self.config.xavier)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Global batches in an epoch; repeats do not make it longer."""
        steps = len(self._images) // batch_size
        if not steps:
            raise AcutanceError(
                f"{self.config.dataset} has {len(self._images)} images to train on, fewer than a batch of {batch_size}:"
                " lower loop.batch_size"
            )
        return steps

    def batches(self, batch_size: int, first_step: int, share: Share) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented images and soft targets."""
        rows, step = share.rows(batch_size), first_step
        while True:
            chosen = self._order(batch_size, step)[rows]
            draws = self._augment.draw(batch_size, generator(self.device, self.seed, step, batch_size))
            yield self._augmented(self._images.images[chosen], self._images.labels[chosen], draws.rows(rows))
            step += 1

    def _order(self, batch_size: int, step: int) -> Tensor:
        """The images of a global batch. Repeated ones stand apart, so that none is mixed with itself."""
        epoch, index = divmod(step, self.steps_per_epoch(batch_size))
        unique = -(-batch_size // self.config.repeats)
        if self._visits[0] != epoch:
            order = epoch_order(len(self._images), self.seed, epoch)
            if self.device.type == "cuda":
                order = order.pin_memory()  # from memory that is not pinned the host would wait for all steps so far
            self._visits = epoch, order.to(self.device, non_blocking=True)
        return self._visits[1][index * unique : (index + 1) * unique].repeat(self.config.repeats)[:batch_size]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy against the soft targets; of a distilled model, the mean over both heads."""
        images, targets = batch
        return soft_cross_entropy(model(images), targets)

    def probe(self) -> Tensor:
        """The first images of the slice "val"."""
        return self._augment.plain(self._split("val").images[:PROBE_IMAGES])

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        """The data."""
        return ("dataset",)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """Top-1 and top-5 accuracy in percent, and the loss; the processes share the work, exactly."""
        images = self._split(split)
        parts = images.images.split(EVALUATED_AT_ONCE), images.labels.split(EVALUATED_AT_ONCE)
        chunks = list(zip(*parts, strict=True))
        rank, world = processes.rank_and_world_size()
        model.eval()
        found = {}
        for first in range(0, len(chunks), world):  # each process as often as the others: a sharded model needs all
            index = min(first + rank, len(chunks) - 1)
            values, labels = chunks[index]
            found[index] = counts(model(self._augment.plain(values)), labels)
        return mean_scores(found, len(chunks), len(images))

    def _split(self, split: str) -> Images:
        if split not in self._splits:
            known: dict[str, SplitName] = {"train": "train", "val": "val", "test": "test"}
            if split not in known:
                raise AcutanceError(f"no split {split!r}; there are {', '.join(known)}")
            found = load_images(self.config.dataset, self.config.data_dir, known[split])
            self._splits[split] = found.to(self.device)
        return self._splits[split]


def build_vit(chosen: ViTConfig, *, weights: str | None, xavier: bool = False) -> ViT:
    """A ViT, from weights if there are any; its mitigation comes last, since an eigen starts from what it finds."""
    model = ViT(**replace(chosen, mitigation=None, mitigation_layers=None).to_dict())
    if xavier:
        widen_start(model)
    if weights is not None:
        load_checkpoint(model, weights)
    if chosen.mitigation is not None:
        model.install(as_mitigation(chosen.mitigation), chosen.mitigation_layers)
    return model


def soft_cross_entropy(scores: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Against soft targets; the mean over heads where there are several."""
    if isinstance(scores, Tensor):
        return F.cross_entropy(scores, targets)
    return torch.stack([F.cross_entropy(head, targets) for head in scores]).mean()


def counts(scores: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, images whose label is first, and among the first five; in float64, on the device."""
    scores = scores.float()
    best = scores.topk(min(5, scores.size(-1))).indices == labels[:, None]
    loss = F.cross_entropy(scores, labels, reduction="sum")
    return torch.stack([loss.double(), best[:, 0].sum(), best.any(-1).sum()])


def mean_scores(own: dict[int, Tensor], chunks: int, images: int) -> dict[str, float]:
    """Scores of a split from the `counts` of its chunks, by their number, that the processes found.

    The host waits for the device once. It adds up in the order of the chunks: the same bits in any number of processes.
    """
    every: dict[int, list[float]] = {}
    for part in processes.gather(dict(zip(own, torch.stack(list(own.values())).tolist(), strict=True))):
        every |= part
    loss, top1, top5 = (sum(every[index][i] for index in range(chunks)) / images for i in range(3))
    return {"top1": 100 * top1, "top5": 100 * top5, "loss": loss}


def widen_start(model: ViT) -> None:
    """DeiT's σ = 0.02 suits 192 channels and more; at 48 it spends most of a short training leaving the origin."""
    draw_xavier(model)
    nn.init.normal_(model.pos_embed, std=0.2)


def _check_fits(model: ViTConfig, images: Images) -> None:
    """Said before training rather than by a shape error in it."""
    channels, height, width = images.images.shape[1:]
    if (model.in_chans, model.image_size, model.image_size) != (channels, height, width):
        raise AcutanceError(
            f"{images.name} has images of {channels}×{height}×{width}; the model takes {model.in_chans}×"
            f"{model.image_size}×{model.image_size}: set task.model.in_chans and task.model.image_size"
        )
    if model.num_classes != len(images.classes):
        raise AcutanceError(
            f"{images.name} has {len(images.classes)} classes, the model {model.num_classes}: "
            "set task.model.num_classes"
        )
