"""DeiT's training in full (https://arxiv.org/abs/2012.12877), shared by the recipes on ImageNet."""

from __future__ import annotations

from typing import Any

from acutance.lab.tasks.classification import preset
from acutance.lab.tasks.imagenet import ImageNetConfig
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig

EPOCHS = 300
BATCH = 1024
DROP_PATH = 0.1
TRAINED = "runs/deit_tiny-seed0/model.safetensors"  # where `acutance train deit_tiny` leaves its model


def deit(model: str, **options: Any) -> Config:
    """A DeiT by its preset: all augmentation, every image three times in a batch, 300 epochs.

    Differences to the public code: bfloat16 in place of float16 with loss scaling; the rate moves at the start of each
    epoch, without that code's quirk of running the first two at the warm-up's start. All training images are used, the
    held-out slice too, since nothing is chosen; the score to report is that of the last weights on the test set.
    """
    return Config(
        task=ImageNetConfig(model=preset(model, drop_path=DROP_PATH, **options), train_on="all"),
        optim=OptimConfig(name="adamw", lr=5e-4 * BATCH / 512, weight_decay=0.05),
        schedule=ScheduleConfig(name="cosine", warmup=5, start=1e-6, final=1e-5, per="epoch", warmup_inside=True),
        loop=LoopConfig(
            epochs=EPOCHS,
            batch_size=BATCH,
            precision="bf16",
            compile=True,
            checkpoint_every=1000,
            evaluate_every=10,
        ),
    )
