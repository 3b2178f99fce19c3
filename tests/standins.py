"""Stand-ins for data sets, and recipes shrunk to a few steps on them.

Handwritten digits stand in for ImageNet's photographs, noise whose colour is its class for ADE20K's scenes, and made-up
words for WikiText-103. What a run is about stays: its mitigation, its kind of attention, its start from another run.
"""

from dataclasses import replace

import numpy as np

from acutance.io.inputs import pillow
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.data.images import load_images
from acutance.lab.tasks.segmentation import WindowConfig

CLASSES = 3  # of the stand-in for ImageNet
PER_CLASS = 20
HELD_OUT_EVERY = 10
SCENES = {"training": 20, "validation": 4}  # ADE20K's held-out slice is every twentieth
SIDE = 20  # pixels of a scene
WORDS = {"train": 2000, "valid": 100, "test": 100}
BODY = {"dim": 12, "depth": 2, "heads": 3}
STEPS = 4
LENGTH = 8  # words of a sequence


def imagenet(folder):
    """Digits as colour images: train/<class>/ and val/<class>/."""
    root = folder / "imagenet"
    for part, train, count in (("train", True, PER_CLASS), ("val", False, 5)) if not root.exists() else ():
        found = load_images("digits", None, "all" if train else "test")
        for label in range(CLASSES):
            for number, image in enumerate(found.images[found.labels == label][:count, 0].numpy()):
                _save(np.stack([image] * 3, -1), root / part / f"digit{label}" / f"{number:03d}.png")
    return root


def ade20k(folder):
    """Every pixel is of some class; 0 is none."""
    root, random = folder / "ADEChallengeData2016", np.random.default_rng(0)
    for part, count in SCENES.items() if not root.exists() else ():
        for number in range(count):
            classes = random.integers(0, 12, (SIDE, SIDE), dtype=np.uint8)
            _save(np.stack([20 * classes] * 3, -1), root / "images" / part / f"{number:03d}.jpg")
            _save(classes, root / "annotations" / part / f"{number:03d}.png")
    return folder


def wikitext(folder):
    """Few words often and many seldom, as wiki.train.tokens and the others."""
    root, random = folder / "wikitext-103", np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    for part, count in WORDS.items():
        words = (f"word{number}" for number in random.zipf(1.5, count).clip(max=300))
        (root / f"wiki.{part}.tokens").write_text(" ".join(words), encoding="utf-8")
    return folder


def _save(pixels, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow().fromarray(pixels).save(path)


def shrink(config, folder):
    """A run of a few steps on a CPU; `folder` is where the stand-ins are."""
    kind, batch = config.task.kind, 8 if config.task.kind == "segmentation" else 16
    sizes = {"classification": 1440, "imagenet": CLASSES * PER_CLASS, "segmentation": SCENES["training"]}
    steps = (WORDS["train"] // batch - 1) // LENGTH if kind == "language" else sizes[kind] // batch
    rarely = {"checkpoint_every": 1000, "evaluate_every": 1000, "keep_last": 1, "monitor_every": None}
    plain = {"batch_size": batch, "accumulate": 1, "precision": "fp32", "compile": False}
    loop = replace(config.loop, epochs=STEPS / max(1, steps), **plain, **rarely)
    shrinking = {"classification": _digits, "imagenet": _imagenet, "segmentation": _segmentation, "language": _language}
    task = replace(config.task, **shrinking[kind](config.task.model, folder))
    return replace(config, task=task, loop=loop, schedule=replace(config.schedule, warmup=0.0))


def _digits(model, _folder):
    model = replace(model, image_size=8, patch_size=2, in_chans=1, num_classes=10, drop_path=0.0, **BODY)
    augment = {"augment": AugmentConfig(crop_pad=1, mixup=0.2, smoothing=0.1), "compile_augment": False}
    return {"dataset": "digits", "data_dir": None, "model": model, **augment, "xavier": True}  # a few steps move it


def _imagenet(model, folder):
    model = replace(model, image_size=16, patch_size=8, num_classes=CLASSES, **BODY)
    where = {"data_dir": str(imagenet(folder)), "held_out_every": HELD_OUT_EVERY}
    return {"model": model, **where, "repeats": 2, "workers": 0}


def _segmentation(model, folder):
    model = replace(model, image_size=16, patch_size=8, decoder_depth=1, decoder_heads=BODY["heads"], **BODY)
    windows = WindowConfig(short_side=16, size=16, stride=12)
    return {"model": model, "data_dir": str(ade20k(folder)), "windows": windows, "workers": 0}


def _language(model, folder):
    model = replace(model, hidden=24, cutoffs=(50,), dim=16, depth=BODY["depth"])
    data_dir = str(wikitext(folder))
    return {"model": model, "data_dir": data_dir, "length": LENGTH, "val_stride": LENGTH, "windows": 256}
