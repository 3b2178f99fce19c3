"""The classification task: which rows a slice has, what is scored, what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.data.images import load_images
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.classification import ClassificationConfig, ClassificationTask
from acutance.models import ViT, ViTConfig

MODEL = ViTConfig(image_size=8, patch_size=4, in_chans=1, dim=8, depth=1, heads=2, num_classes=10)
AUGMENT = AugmentConfig(crop_pad=1, flip=0.5, rand_layers=1, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)


def task(seed=0, model=MODEL, device="cpu", **options):
    return ClassificationTask(ClassificationConfig("digits", model, **options), seed=seed, device=torch.device(device))


def batch(made, step=0, part=None, size=16):
    return next(made.batches(size, step, part or BatchSlice()))


@pytest.mark.parametrize(("repeats", "count"), [(1, 2), (3, 4)])
def test_slices_put_together_are_the_global_batch(count, repeats):
    made = task(augment=AUGMENT, repeats=repeats)
    whole = batch(made, step=5)
    parts = [batch(made, 5, BatchSlice(index, count)) for index in range(count)]
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])


def test_batches_are_a_function_of_seed_and_step():
    running = task(augment=AUGMENT).batches(16, 0, BatchSlice())
    sequence = [next(running) for _ in range(90)]  # beyond the first epoch
    for step in (0, 1, 88):
        assert torch.equal(batch(task(augment=AUGMENT), step)[0], sequence[step][0])
    assert not torch.equal(batch(task(seed=1, augment=AUGMENT))[0], sequence[0][0])


def test_an_epoch_visits_every_image_at_most_once_and_each_epoch_in_another_order():
    made = task()
    steps = made.steps_per_epoch(16)
    assert steps == len(load_images("digits", None, "train")) // 16
    running = made.batches(16, 0, BatchSlice())
    first = torch.cat([next(running)[0] for _ in range(steps)])
    assert len(first.flatten(1).unique(dim=0)) > 0.99 * len(first)  # a few digits are drawn alike
    assert not torch.equal(next(running)[0], first[:16])


def test_repeated_images_come_often_enough_and_never_next_to_themselves():
    order = task(repeats=3)._order(16, 2)
    counts = order.bincount()
    assert len(order) == 16
    assert set(counts[counts > 0].tolist()) <= {2, 3}
    assert (order.reshape(-1, 2)[:, 0] != order.reshape(-1, 2)[:, 1]).all()  # mixup pairs neighbours


class Told(nn.Module):
    """Answers by the mean brightness: scores that are known without the task."""

    def forward(self, images):
        brightness = images.mean((1, 2, 3))
        return -((brightness[:, None] - torch.linspace(-1, 1, 10)) ** 2)


@pytest.mark.parametrize("split", ["val", "test"])
def test_scores_are_those_of_the_plain_formula(split):
    data = load_images("digits", None, split)
    scores = Told()((data.images / 255 - data.mean[0]) / data.std[0]).double()
    ranks = (scores > scores.gather(1, data.labels[:, None])).sum(1)
    expected = {
        "top1": 100 * float((ranks == 0).double().mean()),
        "top5": 100 * float((ranks < 5).double().mean()),
        "loss": float(-scores.log_softmax(-1).gather(1, data.labels[:, None]).mean()),
    }
    assert task().evaluate(Told(), split=split) == pytest.approx(expected, rel=1e-5)


class Read(TorchDispatchMode):
    """Counts the numbers that the host asks for, one at a time."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*args, **(kwargs or {}))


def test_the_last_incomplete_chunk_is_counted(monkeypatch):
    whole = task().evaluate(Told())
    monkeypatch.setattr(ClassificationTask, "evaluated_at_once", 7)
    with Read() as read:
        assert task().evaluate(Told()) == pytest.approx(whole, rel=1e-6)
    assert read.count == 0  # scores are read at the end only, all at once


def test_the_loss_of_a_distilled_model_is_the_mean_over_its_heads():
    images, targets = batch(task())
    heads = torch.randn(16, 10), torch.randn(16, 10)
    both = [-(targets * scores.log_softmax(-1)).sum(-1).mean() for scores in heads]
    torch.testing.assert_close(task().loss(lambda _: heads, (images, targets)), sum(both) / 2)


def test_all_and_fractions_of_the_images():
    sizes = {on: task(train_on=on).steps_per_epoch(1) for on in ("train", "all")}
    assert sizes["all"] == sizes["train"] + len(load_images("digits", None, "val"))
    assert task(fraction=0.1).steps_per_epoch(1) < 0.11 * sizes["train"] + 10


def test_weights_to_start_from_and_a_mitigation_put_in_afterwards(tmp_path):
    trained = ViT(**MODEL.to_dict())
    path = ac.save(trained, tmp_path / "weights.safetensors")
    model = task(model=replace(MODEL, mitigation="neutreno:0.6,learn=layer"), weights=str(path)).build_model()
    assert model.config.mitigation.startswith("neutreno:0.6")
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_what_does_not_fit_is_refused_before_training():
    with pytest.raises(AcutanceError, match=r"digits has images of 1×8×8; the model takes 3×8×8"):
        task(model=replace(MODEL, in_chans=3))
    with pytest.raises(AcutanceError, match="digits has 10 classes, the model 7"):
        task(model=replace(MODEL, num_classes=7))
    with pytest.raises(AcutanceError, match=r"fewer than a batch of 100000: lower loop.batch_size"):
        task().steps_per_epoch(100_000)


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
