"""Stand-ins for data sets, and recipes shrunk to a few steps on them.

Handwritten digits replace ImageNet's photographs, noise whose colour is its class replaces ADE20K's scenes, and made-up
words replace WikiText-103. A run keeps its mitigation, its kind of attention and its start from another run.
"""

import numpy as np

from acutance.io.inputs import pillow
from acutance.lab.data.images import load_images
from acutance.lab.train import override

CLASSES = 3  # of the stand-in for ImageNet
PER_CLASS = 20
HELD_OUT_EVERY = 10
SCENES = {"training": 20, "validation": 4}  # ADE20K's held-out slice is every twentieth
SIDE = 20  # pixels of a scene
WORDS = {"train": 2000, "valid": 100, "test": 100}
STEPS = 4


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
    """Images in which every pixel has a class or 0, which is none."""
    root, random = folder / "ADEChallengeData2016", np.random.default_rng(0)
    for part, count in SCENES.items() if not root.exists() else ():
        for number in range(count):
            classes = random.integers(0, 12, (SIDE, SIDE), dtype=np.uint8)
            _save(np.stack([20 * classes] * 3, -1), root / "images" / part / f"{number:03d}.jpg")
            _save(classes, root / "annotations" / part / f"{number:03d}.png")
    return folder


def wikitext(folder):
    """Text with a few frequent and many rare words, as wiki.train.tokens and the other files."""
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
    """A configuration of a few steps on a CPU; `folder` has the stand-ins."""
    kind = config.task.kind
    make, batch, steps, changes = SHRINKING[kind]
    sizes = "" if kind == "language" else "task.model.dim=12 task.model.depth=2 task.model.heads=3"
    epochs, place = f"loop.epochs={STEPS / steps}", f"task.data_dir={make(folder) if make else None}"
    return override(config, [*f"{FEW_STEPS} {sizes} {changes}".split(), epochs, f"loop.batch_size={batch}", place])


FEW_STEPS = """loop.checkpoint_every=1000 loop.evaluate_every=1000 loop.keep_last=1 loop.monitor_every=none
    loop.compile=false loop.accumulate=1 loop.precision=fp32 schedule.warmup=0"""
SHRINKING = {  # by kind: its stand-in, the batch size, the steps per epoch, and changes of the task
    "classification": (None, 16, 90, """task.dataset=digits task.xavier=true task.compile_augment=false
        task.augment={"crop_pad":1,"mixup":0.2,"smoothing":0.1} task.model.image_size=8 task.model.patch_size=2
        task.model.in_chans=1 task.model.num_classes=10 task.model.drop_path=0"""),  # xavier: few steps suffice
    "imagenet": (imagenet, 16, 3, f"""task.held_out_every={HELD_OUT_EVERY} task.repeats=2 task.workers=0
        task.model.image_size=16 task.model.patch_size=8 task.model.num_classes={CLASSES}"""),
    "segmentation": (ade20k, 8, 2, """task.workers=0 task.windows.short_side=16 task.windows.size=16
        task.windows.stride=12 task.model.image_size=16 task.model.patch_size=8 task.model.decoder_depth=1
        task.model.decoder_heads=3"""),
    "language": (wikitext, 16, 15, """task.length=8 task.val_stride=8 task.windows=256
        task.model.hidden=24 task.model.cutoffs=[50] task.model.dim=16 task.model.depth=2"""),
}  # fmt: skip
