"""The classification task: which rows a slice has, what is scored, what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from acutance.errors import AcutanceError
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.data.images import load_images
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.classification import ClassificationConfig, ClassificationTask
from acutance.models import ViTConfig

MODEL = ViTConfig(image_size=8, patch_size=4, in_chans=1, dim=8, depth=1, heads=2, num_classes=10)
AUGMENT = AugmentConfig(crop_pad=1, flip=0.5, rand_layers=1, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)


def task(seed=0, model=MODEL, device="cpu", **options):
    return ClassificationTask(ClassificationConfig("digits", model, **options), seed=seed, device=torch.device(device))


def batch(made, step=0, part=None, size=16):
    return next(made.batches(size, step, part or BatchSlice()))


def test_an_epoch_visits_every_image_at_most_once_and_each_epoch_in_another_order():
    made = task()
    steps = made.steps_per_epoch(16)
    assert steps == len(load_images("digits", None, "train")) // 16
    running = made.batches(16, 0, BatchSlice())
    first = torch.cat([next(running)[0] for _ in range(steps)])
    assert len(first.flatten(1).unique(dim=0)) > 0.99 * len(first)  # a few digits are drawn alike
    assert not torch.equal(next(running)[0], first[:16])
    sizes = {on: task(train_on=on).steps_per_epoch(1) for on in ("train", "all")}
    assert sizes["all"] == sizes["train"] + len(load_images("digits", None, "val"))
    assert task(fraction=0.1).steps_per_epoch(1) < 0.11 * sizes["train"] + 10


class Told(nn.Module):
    """Answers by the mean brightness: scores that are known without the task."""

    def forward(self, images):
        brightness = images.mean((1, 2, 3))
        return -((brightness[:, None] - torch.linspace(-1, 1, 10)) ** 2)


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
    assert task().evaluate(Told(), split=split) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(ClassificationTask, "evaluated_at_once", 7)  # the last chunk is smaller
    assert task().evaluate(Told(), split=split) == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_a_distilled_model_is_the_mean_over_its_heads():
    images, targets = batch(task())
    heads = torch.randn(16, 10), torch.randn(16, 10)
    both = [-(targets * scores.log_softmax(-1)).sum(-1).mean() for scores in heads]
    torch.testing.assert_close(task().loss(lambda _: heads, (images, targets)), sum(both) / 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in_chans": 3}, r"digits has images of 1×8×8; the model takes 3×8×8"),
        ({"num_classes": 7}, "digits has 10 classes, the model 7"),
        ({}, r"fewer than a batch of 100000: lower loop.batch_size"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(change, words):
    with pytest.raises(AcutanceError, match=words):
        task(model=replace(MODEL, **change)).steps_per_epoch(100_000)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_batch_waits_for_the_device_nor_the_first_of_an_epoch():
    made = task(device="cuda", augment=AUGMENT)
    batches = made.batches(16, made.steps_per_epoch(16) - 2, BatchSlice())
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            next(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
