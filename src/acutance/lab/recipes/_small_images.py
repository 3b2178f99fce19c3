"""A strong recipe for a plain ViT on small images from scratch, shared by the recipes on CIFAR."""

from __future__ import annotations

from typing import Any

from acutance.lab.data.augment import DEIT_SMALL_IMAGES
from acutance.lab.tasks.classification import ClassificationConfig, preset
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig


def small_images(dataset: str, **options: Any) -> Config:
    """ViT-Ti/4 on 32×32: Muon, DeiT's augmentation, a warm-up and a cosine, stochastic depth, bfloat16, 100 epochs.

    Choices are to be made on the held-out slice; for a result, `--set task.train_on=all` and the test set.
    `--set loop.ema=0.9998` keeps a mean of the weights too.
    """
    return Config(
        task=ClassificationConfig(
            dataset=dataset,
            model=preset("vit_tiny_cifar", **{"class_token": False, "stream": "autocast", "drop_path": 0.1, **options}),
            augment=DEIT_SMALL_IMAGES,
            compile_augment=True,
        ),
        optim=OptimConfig(name="muon", lr=2e-3, weight_decay=0.05, clip=1.0),
        schedule=ScheduleConfig(name="cosine", warmup=5, start=1e-6, final=1e-5),
        loop=LoopConfig(
            epochs=100,
            batch_size=512,
            precision="bf16",
            compile=True,
            graph=True,
            checkpoint_every=1000,
            evaluate_every=10,
        ),
    )
