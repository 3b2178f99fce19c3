"""Batches of every task; and classification, of images in memory and of ImageNet's files: images, scores, refusals."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

import standins
from acutance.errors import AcutanceError
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.data.images import load_images
from acutance.lab.tasks import BatchSlice, task_class
from acutance.lab.tasks.classification import ClassificationConfig, ClassificationTask
from acutance.lab.tasks.imagenet import ImageNetConfig
from acutance.models import ViTConfig
from tiny_tasks import language, segmentation

VIT = ViTConfig(image_size=8, patch_size=4, in_chans=1, dim=8, depth=1, heads=2, num_classes=10)
PHOTOS = replace(VIT, image_size=16, patch_size=8, in_chans=3, num_classes=standins.CLASSES)
AUGMENT = AugmentConfig(crop_pad=1, flip=0.5, rand_layers=1, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)


def classification(folder, **options):
    return ClassificationConfig("digits", **{"model": VIT, "augment": AUGMENT, "repeats": 3, **options})


def imagenet(folder, **options):
    where = {"data_dir": str(standins.imagenet(folder)), "held_out_every": standins.HELD_OUT_EVERY}
    return ImageNetConfig(**{"model": PHOTOS, "workers": 0, **where, **options})


def task(config, seed=0, device="cpu"):
    return task_class(config.kind)(config, seed=seed, device=torch.device(device))


def digits(**options):
    return task(ClassificationConfig("digits", **{"model": VIT, **options}))


def test_an_epoch_visits_every_image_at_most_once_and_each_epoch_in_another_order():
    made = digits()
    steps = made.steps_per_epoch(16)
    assert steps == len(load_images("digits", None, "train")) // 16
    running = made.batches(16, 0, BatchSlice())
    first = torch.cat([next(running)[0] for _ in range(steps)])
    assert len(first.flatten(1).unique(dim=0)) > 0.99 * len(first)  # a few digits are drawn alike
    assert not torch.equal(next(running)[0], first[:16])
    sizes = {on: digits(train_on=on).steps_per_epoch(1) for on in ("train", "all")}
    assert sizes["all"] == sizes["train"] + len(load_images("digits", None, "val"))
    assert digits(fraction=0.1).steps_per_epoch(1) < 0.11 * sizes["train"] + 10


def test_a_deep_model_may_start_with_narrower_branches():
    torch.manual_seed(0)
    plain = digits(model=replace(VIT, depth=8)).build_model().state_dict()
    torch.manual_seed(0)
    scaled = digits(model=replace(VIT, depth=8), depth_scaled=True).build_model().state_dict()
    for name, weight in plain.items():
        ends = name.endswith(("attn.proj.weight", "mlp.fc2.weight"))
        torch.testing.assert_close(scaled[name], weight / 4 if ends else weight)  # 1/√(2 · 8)


class Told(nn.Module):
    """Answers by the mean brightness: scores that are known without the task."""

    def forward(self, images):
        return -((images.mean((1, 2, 3))[:, None] - torch.linspace(-1, 1, 10)) ** 2)


@pytest.mark.parametrize("split", ["val", "test"])
def test_scores_are_those_of_the_plain_formula(monkeypatch, split):
    data = load_images("digits", None, split)
    scores = Told()((data.images / 255 - data.mean[0]) / data.std[0]).double()
    ranks = (scores > scores.gather(1, data.labels[:, None])).sum(1)
    expected = {
        "top1": 100 * float((ranks == 0).double().mean()),
        "top5": 100 * float((ranks < 5).double().mean()),
        "loss": float(-scores.log_softmax(-1).gather(1, data.labels[:, None]).mean()),
    }
    for at_once in (1000, 7):  # the last chunk is smaller
        monkeypatch.setattr(ClassificationTask, "evaluated_at_once", at_once)
        assert digits().evaluate(Told(), split=split) == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_a_distilled_model_is_the_mean_over_its_heads():
    targets, heads = torch.rand(16, 10), torch.randn(2, 16, 10)
    both = [-(targets * scores.log_softmax(-1)).sum(-1).mean() for scores in heads]
    torch.testing.assert_close(digits().loss(lambda _: tuple(heads), (None, targets)), sum(both) / 2)


def test_repeated_augmentation_shows_an_image_thrice_a_batch_and_each_time_anew(folder):
    images, targets = next(task(imagenet(folder, augment=AugmentConfig())).batches(12, 0, BatchSlice()))
    assert torch.equal(targets, targets[:4].repeat(3, 1))
    assert not torch.equal(images[:4], images[4:8])


def test_images_are_trained_on_but_for_the_slice_and_scores_are_a_plain_count(folder):
    made = task(imagenet(folder))
    model = made.build_model().eval()
    labels = torch.arange(standins.CLASSES).repeat_interleave(5)
    with torch.no_grad():
        right = model(made.inputs("test", range(made.size("test")))).argmax(-1) == labels
    assert made.evaluate(model, split="test")["top1"] == pytest.approx(100 * float(right.double().mean()))
    assert torch.equal(made.labelled("test", range(made.size("test")))[1], labels)
    assert made.probe().shape[0] == made.size("val")
    kept = standins.CLASSES * (standins.PER_CLASS - standins.PER_CLASS // standins.HELD_OUT_EVERY)
    assert made.steps_per_epoch(6) == kept // 6  # without the slice
    everything = task(imagenet(folder, train_on="all", data_dir=str(folder)))  # where other data sets are, too
    assert everything.steps_per_epoch(6) == standins.CLASSES * standins.PER_CLASS // 6


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (classification, {"model": replace(VIT, in_chans=3)}, r"digits has images of 1×8×8; the model takes 3×8×8"),
        (classification, {"model": replace(VIT, num_classes=7)}, "digits has 10 classes, the model 7"),
        (classification, {}, r"fewer than a batch of 100000: lower loop.batch_size"),
        (imagenet, {"data_dir": None}, "name it with --data-dir"),
        (imagenet, {"model": replace(PHOTOS, num_classes=7)}, "the data has 3 classes, the model 7"),
        (imagenet, {"repeats": 0}, "task.repeats must be 1 or more"),
        (imagenet, {"held_out_every": 100}, "no class has 100 images.*lower task.held_out_every"),
        (imagenet, {"held_out_every": 100, "train_on": "all"}, "no class has 100 images.*lower task.held_out_every"),
        (imagenet, {"model": replace(PHOTOS, in_chans=1)}, "3 channels"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(folder, make, changes, words):
    with pytest.raises(AcutanceError, match=words):
        task(make(folder, **changes)).steps_per_epoch(100_000)


@pytest.mark.cuda
def test_no_batch_waits_for_the_device_nor_the_first_of_an_epoch():
    made = task(classification(None), device="cuda")
    batches = made.batches(16, made.steps_per_epoch(16) - 2, BatchSlice())
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            next(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [classification, imagenet, language, segmentation])
def test_a_batch_is_a_function_of_seed_and_step_and_slices_are_its_rows(make, tmp_path):
    made, other = (task(make(tmp_path), seed) for seed in (0, 1))
    late = made.steps_per_epoch(8) + 1  # beyond the first epoch
    straight = list(islice(made.batches(8, 0, BatchSlice()), late + 1))
    for step in (0, 1, late):
        parts = [next(made.batches(8, step, BatchSlice(index, 4))) for index in range(4)]
        for entry, expected in enumerate(straight[step]):
            assert torch.equal(next(made.batches(8, step, BatchSlice()))[entry], expected)
            assert torch.equal(torch.cat([part[entry] for part in parts]), expected)
    if make is not language:  # whose epochs all read the text from its beginning
        assert not torch.equal(next(other.batches(8, 0, BatchSlice()))[0], straight[0][0])
        assert not torch.equal(straight[0][0], straight[late - 1][0])
