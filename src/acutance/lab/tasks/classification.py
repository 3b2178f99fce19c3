"""Image classification with a ViT, on images that live on the device and are augmented there."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import AcutanceError
from acutance.lab.data.augment import Augment, AugmentConfig
from acutance.lab.data.images import Images, load_images
from acutance.lab.data.seeds import epoch_order, generator
from acutance.lab.data.source import fraction
from acutance.lab.data.stream import repeated, visits
from acutance.lab.studies.depth import draw_xavier
from acutance.lab.tasks import base
from acutance.lab.tasks.base import BatchSlice, ConfigT, incidental
from acutance.models import ViT, ViTConfig


@dataclass(frozen=True)
class ClassificationConfig:
    """Which images, which model, and how the images are augmented. The mitigation is the model's."""

    kind: ClassVar[str] = "classification"
    dataset: str
    model: ViTConfig
    data_dir: str | None = incidental(None)
    train_on: Literal["train", "all"] = "train"  # all includes the slice "val": for a last run, after all choices
    fraction: float = 1.0  # of each class's images to train on; the seed chooses them, see data.source
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    compile_augment: bool = incidental(False)
    repeats: int = 1  # how often an image is in a batch, augmented anew each time (DeiT's repeated augmentation: 3)
    weights: str | None = None  # start from these, e.g. to fine-tune; a file that acutance.io.load_checkpoint reads
    xavier: bool = False  # Xavier's initialisation; DeiT's σ = 0.02 is too small for few channels
    depth_scaled: bool = False  # scale the initial last matrix of each branch by 1/√(2 · depth) (GPT-2's rule)

    def __post_init__(self) -> None:
        base.check_ranges("task", self, {"1 or more": "repeats"})


class Classification(base.ImageTask[ConfigT]):
    """Cross-entropy against soft targets; top-1 and top-5 accuracy in percent, and the plain cross-entropy."""

    headline: ClassVar[str] = "top1"
    evaluated_at_once: ClassVar[int]  # images in a forward pass of `evaluate`

    def _make_augment(self, classes: int, mean: Sequence[float], std: Sequence[float]) -> None:
        config: Any = self.config
        self._augment = Augment(config.augment, classes=classes, mean=mean, std=std, device=self.device)
        self._augmented: Any = self._augment
        if config.compile_augment:
            # Without inductor's CUDA graphs: they write every batch to the same place, but one batch is made ahead.
            self._augmented = torch.compile(self._augment, options={"triton.cudagraphs": False})

    @abstractmethod
    def _rows(self, batch_size: int, first_step: int, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """These rows of global batch `first_step`, the next, and so on: images as bytes, and their labels."""

    @abstractmethod
    def _read(self, images: Any, indices: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Chosen images without augmentation, and their labels, `evaluated_at_once` at a time."""

    def build_model(self) -> nn.Module:
        config: Any = self.config
        starts = {name: getattr(config, name, False) for name in ("xavier", "depth_scaled")}
        return build_vit(config.model, weights=config.weights, **starts)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Soft cross-entropy; for a distilled model, the mean over both heads."""
        images, targets = batch
        scores = model(images)
        heads = (scores,) if isinstance(scores, Tensor) else scores
        return torch.stack([F.cross_entropy(head, targets) for head in heads]).mean()

    def batches(self, batch_size: int, first_step: int, part: BatchSlice) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented images and soft targets."""
        rows = part.rows(batch_size)
        for step, (images, labels) in enumerate(self._rows(batch_size, first_step, rows), first_step):
            draws = self._augment.draw(batch_size, generator(self.device, self.seed, step, batch_size))
            yield self._augmented(images, labels, draws.rows(rows))

    def inputs(self, split: str, indices: Sequence[int]) -> Tensor:
        return self.labelled(split, indices)[0]

    def labelled(self, split: str, indices: Sequence[int]) -> tuple[Tensor, ...]:
        read = [(self._augment.plain(batch), labels) for batch, labels in self._read(self._images(split), indices)]
        return tuple(torch.cat(part) for part in zip(*read, strict=True))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """The processes share the work. Sums are added in the order of the chunks, so their number changes nothing."""
        images = self._images(split)
        chunks = torch.arange(len(images)).split(self.evaluated_at_once)
        own = base.turns(len(chunks))
        model.eval()
        batches = self._read(images, torch.cat([chunks[index] for index in own]).tolist())
        sums = [_sums(model(self._augment.plain(batch)), labels) for batch, labels in batches]
        found = base.in_order(own, torch.stack(sums).tolist())  # the host waits only here
        loss, top1, top5 = (sum(column) / len(images) for column in zip(*found, strict=True))
        return {"top1": 100 * top1, "top5": 100 * top5, "loss": loss}


class ClassificationTask(Classification[ClassificationConfig]):
    """Images on the device."""

    made_on_device: ClassVar[bool] = True
    evaluated_at_once: ClassVar[int] = 1000

    def __init__(
        self, config: ClassificationConfig, *, seed: int, device: torch.device, images: Images | None = None
    ) -> None:
        """`images` to train on replace those of the configuration."""
        super().__init__(config, seed=seed, device=device)
        images = load_images(config.dataset, config.data_dir, config.train_on) if images is None else images
        if config.fraction < 1:
            images = images.subset(fraction(images.labels, config.fraction, seed))
        given, size = tuple(images.images.shape[1:]), config.model.image_size
        if given != (taken := (config.model.in_chans, size, size)):
            sizes = f"{'×'.join(map(str, given))}; the model takes {'×'.join(map(str, taken))}"
            advice = "set task.model.in_chans and task.model.image_size"
            raise AcutanceError(f"{images.name} has images of {sizes}: {advice}")
        base.refuse_other_classes(images.name, len(images.classes), config.model.num_classes)
        self._train = images.to(device)
        self._make_augment(len(images.classes), images.mean, images.std)

    def _rows(self, batch_size: int, first_step: int, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in visits(partial(self._order, batch_size), batch_size, first_step):
            yield self._train.images[chosen[rows]], self._train.labels[chosen[rows]]

    def _order(self, batch_size: int, epoch: int) -> Tensor:
        order = repeated(epoch_order(len(self._train), self.seed, epoch), batch_size, self.config.repeats)
        if self.device.type == "cuda":
            order = order.pin_memory()  # copying from pageable memory would make the host wait for all steps so far
        return order.to(self.device, non_blocking=True)

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        return ("dataset",)

    def _load(self, split: str) -> Images:
        return load_images(self.config.dataset, self.config.data_dir, cast(Any, split)).to(self.device)

    def _read(self, images: Images, indices: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in torch.tensor(indices).to(self.device).split(self.evaluated_at_once):
            yield images.images[chunk], images.labels[chunk]


def build_vit(chosen: ViTConfig, *, weights: str | None, xavier: bool = False, depth_scaled: bool = False) -> ViT:
    """A ViT with its mitigation, from initial weights if any are named."""
    model = ViT(**replace(chosen, mitigation=None, mitigation_layers=None).to_dict())
    if xavier:  # DeiT's σ = 0.02 suits 192 channels and more; with 48, a short training hardly leaves the origin
        draw_xavier(model)
        nn.init.normal_(model.pos_embed, std=0.2)
    if depth_scaled:
        with torch.no_grad():
            for _, block in model.named_blocks():
                block.attn.proj.weight.mul_((2 * chosen.depth) ** -0.5)
                block.mlp.fc2.weight.mul_((2 * chosen.depth) ** -0.5)
    base.load_and_install(model, weights, chosen.mitigation, chosen.mitigation_layers)
    return model


def _sums(scores: Tensor, labels: Tensor) -> Tensor:
    """The summed loss and the numbers of top-1 and top-5 hits, in float64 on the device."""
    scores = scores.float()
    best = scores.topk(min(5, scores.size(-1))).indices == labels[:, None]
    loss = F.cross_entropy(scores, labels, reduction="sum")
    return torch.stack([loss.double(), best[:, 0].sum(), best.any(-1).sum()])
