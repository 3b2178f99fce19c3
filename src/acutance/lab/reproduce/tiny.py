"""The same path in seconds: every configuration shrunk, every data set replaced by a stand-in.

What a run is about stays: its mitigation, its kind of attention, its start from another run, its part of the data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from acutance.lab.data.augment import AugmentConfig
from acutance.lab.reproduce import standins
from acutance.lab.tasks.windows import WindowConfig
from acutance.lab.train.config import Config

DEPTH, DIM, HEADS = 2, 12, 3
BODY = {"dim": DIM, "depth": DEPTH, "heads": HEADS}
SAMPLES = 8  # on which models are read
STEPS = 4
LENGTH = 8  # words of a sequence


def shrink(config: Config, folder: Path) -> Config:
    """A run of a few steps on a CPU; `folder` is where the stand-ins are."""
    task = SHRINKING[config.task.kind](config.task, folder)
    batch = 8 if config.task.kind == "segmentation" else 16
    loop = replace(
        config.loop,
        epochs=STEPS / standins.steps(config.task.kind, batch),
        batch_size=batch,
        accumulate=1,
        precision="fp32",
        compile=False,
        checkpoint_every=1000,
        evaluate_every=1000,
        keep_last=1,
        monitor_every=None,
    )
    return replace(config, task=task, loop=loop, schedule=replace(config.schedule, warmup=0.0))


def _classification(task: Any, folder: Path) -> Any:
    model = replace(task.model, image_size=8, patch_size=2, in_chans=1, num_classes=10, drop_path=0.0, **BODY)
    return replace(
        task,
        dataset="digits",
        data_dir=None,
        model=model,
        augment=AugmentConfig(crop_pad=1, mixup=0.2, smoothing=0.1),
        compile_augment=False,
        xavier=True,  # so that a few steps move it
    )


def _imagenet(task: Any, folder: Path) -> Any:
    model = replace(task.model, image_size=16, patch_size=8, num_classes=standins.CLASSES, **BODY)
    return replace(
        task,
        data_dir=str(standins.imagenet(folder)),
        model=model,
        held_out_every=standins.HELD_OUT_EVERY,
        repeats=2,
        workers=0,
    )


def _segmentation(task: Any, folder: Path) -> Any:
    model = replace(task.model, image_size=16, patch_size=8, decoder_depth=1, decoder_heads=HEADS, **BODY)
    windows = WindowConfig(short_side=16, size=16, stride=12)
    return replace(task, data_dir=str(standins.ade20k(folder)), model=model, windows=windows, workers=0)


def _language(task: Any, folder: Path) -> Any:
    model = replace(task.model, hidden=24, cutoffs=(50,), dim=16, depth=DEPTH)
    data_dir = str(standins.wikitext(folder))
    return replace(task, data_dir=data_dir, model=model, length=LENGTH, val_stride=LENGTH, windows=256)


SHRINKING = {
    "classification": _classification,
    "imagenet": _imagenet,
    "segmentation": _segmentation,
    "language": _language,
}
