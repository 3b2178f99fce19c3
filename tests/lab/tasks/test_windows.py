"""Whole images through windows, against a plain second implementation; mean IoU against torchmetrics'."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from acutance.errors import AcutanceError
from acutance.lab.tasks import segmentation as windows
from acutance.lab.tasks.segmentation import MULTI, SINGLE, WindowConfig, confusion, probabilities, scores, segmented

WINDOWS = WindowConfig(short_side=16, size=12, stride=9, at_once=2)


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


def image(height, width, seed=1):
    return torch.randn(3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(16, 16), (20, 33), (33, 20), (5, 7), (8, 60), (16, 12)])
@pytest.mark.parametrize(("views", "scales", "flips"), [
    (SINGLE, [1.0], [False]),
    (MULTI, [0.5, 0.75, 1.0, 1.25, 1.5, 1.75], [False, True]),
])  # fmt: skip
def test_equals_the_plain_windows(size, views, scales, flips):
    score, picture = Score(), image(*size)
    found = probabilities(score, picture, views, WINDOWS).detach()
    assert score.calls == windows.forward_passes(size, views, WINDOWS)
    expected = plain_probabilities(score, picture, scales, flips, short=16, window=12, stride=9)
    assert found.shape == (4, *size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_images_come_with_their_index_and_without_a_graph():
    pictures = [image(16, 16, 1), image(20, 33, 2)]
    found = dict(segmented(Score(), pictures.__getitem__, len(pictures), SINGLE, WINDOWS))
    for index, picture in enumerate(pictures):
        assert torch.equal(found[index], probabilities(Score(), picture, SINGLE, WINDOWS).argmax(0))
    assert not any(classes.requires_grad for classes in found.values())


@pytest.mark.slow  # its import alone takes seconds
@pytest.mark.parametrize("present", [5, 2, 1])
def test_mean_iou_is_torchmetrics(present):
    torchmetrics = pytest.importorskip("torchmetrics.classification")
    guesses, labels = torch.randint(present, (2, 60, 7), generator=torch.Generator().manual_seed(0))
    labels[::5] = 255
    total = confusion(guesses, labels, 5)
    jaccard = torchmetrics.MulticlassJaccardIndex(5, average="macro", ignore_index=255)
    assert scores(total)["miou"] == pytest.approx(100 * float(jaccard(guesses, labels)), rel=1e-5)
    assert torch.equal(total, torchmetrics.MulticlassConfusionMatrix(5, ignore_index=255)(guesses, labels))


def test_scores_by_hand():
    labels = torch.tensor([[0, 0, 0, 1], [1, 255, 2, 255]])
    guesses = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 3]])
    found = scores(confusion(guesses, labels, 5))  # classes 3 and 4 neither labelled nor, where it counts, guessed
    assert found["miou"] == pytest.approx(100 * np.mean([2 / 4, 2 / 3, 0]))
    assert found["mean_accuracy"] == pytest.approx(100 * np.mean([2 / 3, 1, 0]))
    assert found["pixel_accuracy"] == pytest.approx(100 * 4 / 6)


@pytest.mark.parametrize(("short", "size"), [(49, 64), (276, 352)])
def test_a_square_that_grows_to_a_window_is_a_whole_window(short, size):
    config = WindowConfig(short_side=short, size=size, stride=size)
    assert windows.view_sizes((short, short), 1.0, config)[1] == (size, size)
    for options in ({"stride": 513}, {"stride": 0}, {"at_once": 0}):
        with pytest.raises(AcutanceError, match="leave pixels out"):
            WindowConfig(**options)
