"""ImageNet's task on a tree of folders: batches by (seed, step) alone, scores against a plain count."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import standins
from acutance.errors import AcutanceError
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.imagenet import ImageNetConfig, ImageNetTask
from acutance.models import ViTConfig

MODEL = ViTConfig(image_size=16, patch_size=8, dim=12, depth=2, heads=3, num_classes=standins.CLASSES)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return standins.imagenet(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(folder):
    return ImageNetConfig(
        model=MODEL, data_dir=str(folder), held_out_every=standins.HELD_OUT_EVERY, workers=0, repeats=3
    )


def task(config, seed=0):
    return ImageNetTask(config, seed=seed, device=CPU)


def batch(made, step, part=None):
    return next(iter(made.batches(12, step, part or BatchSlice())))


def test_repeated_augmentation_shows_an_image_thrice_a_batch_and_each_time_anew(config):
    images, targets = batch(task(replace(config, augment=AugmentConfig())), 0)
    assert torch.equal(targets[:4], targets[4:8])
    assert torch.equal(targets[:4], targets[8:])
    assert not torch.equal(images[:4], images[4:8])


def test_images_are_trained_on_but_for_the_slice_and_scores_are_a_plain_count(config):
    made = task(config)
    model = made.build_model().eval()
    labels = torch.arange(standins.CLASSES).repeat_interleave(5)
    with torch.no_grad():
        right = model(made.inputs("test", range(made.size("test")))).argmax(-1) == labels
    assert made.evaluate(model, split="test")["top1"] == pytest.approx(100 * float(right.double().mean()))
    assert made.probe().shape[0] == made.size("val")
    kept = standins.CLASSES * (standins.PER_CLASS - standins.PER_CLASS // standins.HELD_OUT_EVERY)
    assert made.steps_per_epoch(6) == kept // 6  # without the slice
    assert task(replace(config, train_on="all")).steps_per_epoch(6) == standins.CLASSES * standins.PER_CLASS // 6
    beside = task(replace(config, data_dir=str(Path(config.data_dir).parent)))  # where other data sets are, too
    assert beside.size("test") == made.size("test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": None}, "name it with --data-dir"),
        ({"model": replace(MODEL, num_classes=7)}, "the data has 3 classes, the model 7"),
        ({"repeats": 0}, "task.repeats must be 1 or more"),
        ({"held_out_every": 100}, "no class has 100 images.*lower task.held_out_every"),
        ({"held_out_every": 100, "train_on": "all"}, "no class has 100 images.*lower task.held_out_every"),
        ({"model": replace(MODEL, in_chans=1)}, "3 channels"),
    ],
)
def test_mistakes_are_said_before_training(config, changes, message):
    with pytest.raises(AcutanceError, match=message):
        task(replace(config, **changes))
