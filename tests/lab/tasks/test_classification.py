"""The classification task: which rows a share has, what is scored, what is refused."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.errors import AcutanceError
from acutance.io.saving import save
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.data.images import load_images
from acutance.lab.tasks import BatchSlice, config_class, task_class
from acutance.lab.tasks.classification import ClassificationConfig, ClassificationTask
from acutance.models import ViT, ViTConfig

MODEL = ViTConfig(image_size=8, patch_size=4, in_chans=1, dim=8, depth=1, heads=2, num_classes=10)
CPU = torch.device("cpu")
AUGMENT = AugmentConfig(crop_pad=1, flip=0.5, rand_layers=1, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)


def task(seed=0, **options):
    return ClassificationTask(ClassificationConfig("digits", MODEL, **options), seed=seed, device=CPU)


def batch(made, step=0, share=None, size=16):
    return next(made.batches(size, step, share or BatchSlice()))


def test_the_kind_leads_to_its_classes():
    assert task_class("classification") is ClassificationTask
    assert config_class("classification") is ClassificationConfig


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_shares_put_together_are_the_global_batch(count, repeats):
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
    images = load_images("digits", None, "train")
    assert steps == len(images) // 16
    running = made.batches(16, 0, BatchSlice())
    first = torch.cat([next(running)[0] for _ in range(steps)])
    second = next(running)[0]
    assert len(first.flatten(1).unique(dim=0)) > 0.99 * len(first)  # a few digits are drawn alike
    assert not torch.equal(second, first[:16])


def test_repeated_images_come_often_enough_and_never_next_to_themselves():
    made = task(repeats=3)
    order = made._order(16, 2)
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
    made, data = task(), load_images("digits", None, split)
    scores = Told()((data.images / 255 - data.mean[0]) / data.std[0]).double()
    ranks = (scores > scores.gather(1, data.labels[:, None])).sum(1)
    expected = {
        "top1": 100 * float((ranks == 0).double().mean()),
        "top5": 100 * float((ranks < 5).double().mean()),
        "loss": float(-scores.log_softmax(-1).gather(1, data.labels[:, None]).mean()),
    }
    assert made.evaluate(Told(), split=split) == pytest.approx(expected, rel=1e-5)


def test_the_last_incomplete_chunk_is_counted(monkeypatch):
    whole = task().evaluate(Told())
    monkeypatch.setattr(ClassificationTask, "evaluated_at_once", 7)
    assert task().evaluate(Told()) == pytest.approx(whole, rel=1e-6)


class Read(TorchDispatchMode):
    """Counts the numbers that the host asks for, one at a time."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*args, **(kwargs or {}))


def test_scores_are_read_at_the_end_only(monkeypatch):
    monkeypatch.setattr(ClassificationTask, "evaluated_at_once", 7)
    with Read() as read:
        task().evaluate(Told())
    assert read.count == 0


def test_the_loss_of_a_distilled_model_is_the_mean_over_its_heads():
    images, targets = batch(task())
    one, other = torch.randn(16, 10), torch.randn(16, 10)
    both = [-(targets * scores.log_softmax(-1)).sum(-1).mean() for scores in (one, other)]
    found = task().loss(lambda _: (one, other), (images, targets))
    torch.testing.assert_close(found, sum(both) / 2)


def test_all_and_fractions_of_the_images():
    sizes = {on: task(train_on=on).steps_per_epoch(1) for on in ("train", "all")}
    assert sizes["all"] == sizes["train"] + len(load_images("digits", None, "val"))
    assert task(fraction=0.1).steps_per_epoch(1) < 0.11 * sizes["train"] + 10


def test_weights_to_start_from_and_a_mitigation_put_in_afterwards(tmp_path):
    trained = ViT(**MODEL.to_dict())
    save(trained, tmp_path / "weights.safetensors")
    options = {**MODEL.to_dict(), "mitigation": "neutreno:0.6,learn=layer"}
    config = ClassificationConfig("digits", ViTConfig(**options), weights=str(tmp_path / "weights.safetensors"))
    model = ClassificationTask(config, seed=0, device=CPU).build_model()
    assert model.config.mitigation.startswith("neutreno:0.6")
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_chans": 3}, r"digits has images of 1×8×8; the model takes 3×8×8"),
        ({"num_classes": 7}, "digits has 10 classes, the model 7"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_training(change, message):
    config = ClassificationConfig("digits", ViTConfig(**{**MODEL.to_dict(), **change}))
    with pytest.raises(AcutanceError, match=message):
        ClassificationTask(config, seed=0, device=CPU)


def test_too_large_a_batch_is_refused():
    with pytest.raises(AcutanceError, match=r"fewer than a batch of 100000: lower loop.batch_size"):
        task().steps_per_epoch(100_000)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_batch_waits_for_the_device_nor_the_first_of_an_epoch():
    config = ClassificationConfig("digits", MODEL, augment=AUGMENT)
    made = ClassificationTask(config, seed=0, device=torch.device("cuda"))
    steps = made.steps_per_epoch(16)
    batches = made.batches(16, steps - 2, BatchSlice())
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            next(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
