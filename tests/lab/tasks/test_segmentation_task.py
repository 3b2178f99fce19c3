"""Segmentation: batches, the loss, whole images through windows against a plain second implementation, scores."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.data import load_segmentation
from acutance.lab.tasks import BatchSlice, segmentation
from acutance.lab.tasks.segmentation import MULTI, SINGLE, WindowConfig, confusion, probabilities, scores
from acutance.models import ViT
from tiny_tasks import SEGMENTER, WINDOWS
from tiny_tasks import segmentation as camvid

SMALL = WindowConfig(short_side=16, size=12, stride=9, at_once=2)


def task_on(folder, **options):
    return segmentation.SegmentationTask(camvid(folder, **options), seed=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def task(folder):
    return task_on(folder)


def test_the_loss_counts_labelled_pixels_only(task, model):
    """Of normalised crops."""
    images, labels = next(task.batches(4, 0, BatchSlice()))
    assert (images.shape, images.dtype) == ((4, 3, 16, 16), torch.float32)
    assert (labels.shape, labels.dtype) == ((4, 16, 16), torch.int64)
    assert {255} < set(labels.unique().tolist()) <= {*range(11), 255}
    assert images.abs().max() < 3
    expected = F.cross_entropy(model(images), labels, ignore_index=255)
    torch.testing.assert_close(task.loss(model, (images, labels)), expected)
    nothing = task.loss(model, (images, torch.full_like(labels, 255)))
    assert nothing == 0
    nothing.backward()


def test_the_middle_of_an_image_has_the_labels_of_its_pixels(task):
    every, size = range(task.size("train")), task.config.model.image_size
    images, labels = task.labelled("train", every)
    assert torch.equal(images, task.inputs("train", every))
    assert (labels != -100).any()
    for found, (image, given) in zip(labels, (task._images("train")[index] for index in every), strict=True):
        top, left = (max(extent - size, 0) // 2 for extent in given.shape)
        middle = given[top : top + size, left : left + size]
        counted = found[: middle.shape[0], : middle.shape[1]]
        assert torch.equal(counted, torch.where(middle == 255, -100, middle))
        assert int((found != -100).sum()) == int((middle != 255).sum())
        assert image.shape[1:] == given.shape


def test_whole_images_are_scored_at_one_scale_and_on_test_at_several(task, model):
    assert set(task.evaluate(model.train())) == {"miou", "mean_accuracy", "pixel_accuracy"}
    assert not model.training
    test = task.evaluate(model, split="test")
    with torch.no_grad():
        total = sum(
            confusion(probabilities(model, segmentation.normalised(image), MULTI, WINDOWS).argmax(0), labels, 11)
            for image, labels in load_segmentation("camvid", task.config.data_dir, "test")
        )
    assert test["miou_ms"] == pytest.approx(scores(total)["miou"], abs=1e-9)
    with pytest.raises(AcutanceError, match="no split 'dev'"):
        task.evaluate(model, split="dev")
    perfect = task.evaluate(Oracle(), split="train")  # whose short side is that of the windows: nothing is resized
    assert perfect == {"miou": 100.0, "mean_accuracy": 100.0, "pixel_accuracy": 100.0}


class Oracle(torch.nn.Module):
    """Reads the label off the colour; windows that are not resized keep it."""

    def forward(self, images):
        red = images[:, 0] * 58.395 + 123.675
        return -50 * (red[:, None] / 20 - torch.arange(11.0)[:, None, None]).abs()


def test_a_mitigation_is_installed_in_both_parts_after_the_encoders_weights(folder):
    torch.manual_seed(3)
    vit = ViT(image_size=8, patch_size=4, dim=12, depth=3, heads=3, num_classes=7)
    path = ac.save(vit, folder / "vit.safetensors")
    chosen = replace(SEGMENTER, mitigation="neutreno:0.6,learn=head")
    model = task_on(folder, model=chosen, encoder_weights=str(path)).build_model()
    assert model.config == chosen
    assert torch.equal(model.encoder.blocks[1].attn.qkv.weight, vit.blocks[1].attn.qkv.weight)
    assert torch.equal(model.encoder.pos_embed[:, 0], vit.pos_embed[:, 0])
    expected = F.interpolate(vit.pos_embed[:, 1:].mT.unflatten(2, (2, 2)), size=(4, 4), mode="bilinear")
    torch.testing.assert_close(model.encoder.pos_embed[:, 1:], expected.flatten(2).mT)


def test_what_does_not_fit_is_refused(task, folder):
    with pytest.raises(AcutanceError, match=r"camvid has 11 classes, the model 12: set task\.model\.num_classes"):
        task_on(folder, model=replace(SEGMENTER, num_classes=12))
    with pytest.raises(AcutanceError, match=r"camvid has 8 images to train on, fewer than a batch of 9"):
        task.steps_per_epoch(9)
    assert task_on(folder, train_on="all").steps_per_epoch(9) == 1


class Score(nn.Module):
    """Four classes whose scores depend on the pixel, on the whole window and on the place in it."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64, generator=draw))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        local = torch.einsum("cd,bdhw->bchw", self.weight, images)
        place = torch.linspace(0, 1, images.shape[-1], dtype=torch.float64)
        return local + local.mean((2, 3), keepdim=True) + place * self.weight.sum(1)[:, None, None]


def plain_probabilities(score, image, scales, flips, *, short, window, stride):
    """The mean over views of the softmax of averaged window scores, window by window in float64."""

    def resized(image, *size):
        return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]

    height, width = image.shape[1:]
    found = []
    for scale in scales:
        factor = min(int(short * scale) / min(height, width), int(4 * short * scale) / max(height, width))
        h, w = int(height * factor + 0.5), int(width * factor + 0.5)
        view = resized(image, h, w)
        if min(h, w) < window:
            long = int(max(h, w) / min(h, w) * window)
            view = resized(view, *((window, long) if h < w else (long, window)))
        for flip in flips:
            seen = view.flip(-1) if flip else view
            total, count = torch.zeros(4, *seen.shape[1:], dtype=torch.float64), torch.zeros(seen.shape[1:])
            starts = [[*range(0, extent - window, stride), extent - window] for extent in seen.shape[1:]]
            for top, left in product(*starts):
                inside = (slice(None), slice(top, top + window), slice(left, left + window))
                total[inside] += score(seen[inside][None])[0].detach()
                count[inside[1:]] += 1
            scores = resized(total / count, height, width)
            found.append((scores.flip(-1) if flip else scores).softmax(0))
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("size", [(16, 16), (20, 33), (33, 20), (5, 7), (8, 60), (16, 12)])
@pytest.mark.parametrize(("views", "scales", "flips"), [
    (SINGLE, [1.0], [False]),
    (MULTI, [0.5, 0.75, 1.0, 1.25, 1.5, 1.75], [False, True]),
])  # fmt: skip
def test_equals_the_plain_windows(size, views, scales, flips):
    draw = torch.Generator().manual_seed(1)
    score, picture = Score(), torch.randn(3, *size, dtype=torch.float64, generator=draw)
    found = probabilities(score, picture, views, SMALL).detach()
    assert score.calls == segmentation.forward_passes(size, views, SMALL)
    expected = plain_probabilities(score, picture, scales, flips, short=16, window=12, stride=9)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for index, classes in segmentation.segmented(score, [picture.flip(1), picture].__getitem__, 2, views, SMALL):
        assert torch.equal(classes, found.argmax(0)) == bool(index)
        assert not classes.requires_grad


def test_scores_by_hand():
    labels = torch.tensor([[0, 0, 0, 1], [1, 255, 2, 255]])
    guesses = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 3]])
    found = scores(confusion(guesses, labels, 5))  # classes 3 and 4 neither labelled nor, where it counts, guessed
    assert found["miou"] == pytest.approx(100 * np.mean([2 / 4, 2 / 3, 0]))
    assert found["mean_accuracy"] == pytest.approx(100 * np.mean([2 / 3, 1, 0]))
    assert found["pixel_accuracy"] == pytest.approx(100 * 4 / 6)


def test_a_square_that_grows_to_a_window_is_a_whole_window_and_windows_leave_nothing_out():
    for short, size in ((49, 64), (276, 352)):
        config = WindowConfig(short_side=short, size=size, stride=size)
        assert segmentation.view_sizes((short, short), 1.0, config)[1] == (size, size)
    for options in ({"stride": 513}, {"stride": 0}, {"at_once": 0}):
        with pytest.raises(AcutanceError, match="leave pixels out"):
            WindowConfig(**options)
