"""Segmentation on a tiny CamVid: what a batch is, the loss, and the scores of whole images."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.data import load_segmentation
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.segmentation import MULTI, SegmentationTask, confusion, normalised, probabilities, scores
from acutance.models import ViT
from tiny_tasks import SEGMENTER, WINDOWS, segmentation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


def task_on(folder, **options):
    return SegmentationTask(segmentation(folder, **options), seed=0, device=torch.device("cpu"))


@pytest.fixture
def task(folder):
    return task_on(folder)


@pytest.fixture
def model(task):
    """With weights that are spread out."""
    torch.manual_seed(0)
    model = task.build_model()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def test_batches_are_normalised_crops(task):
    images, labels = next(task.batches(2, 0, BatchSlice()))
    assert (images.shape, images.dtype) == ((2, 3, 16, 16), torch.float32)
    assert (labels.shape, labels.dtype) == ((2, 16, 16), torch.int64)
    assert set(labels.unique().tolist()) <= {*range(11), 255}
    assert images.abs().max() < 3
    assert task.steps_per_epoch(2) == 4


def test_the_loss_counts_labelled_pixels_only(task, model):
    images, labels = next(task.batches(4, 0, BatchSlice()))
    assert (labels == 255).any()
    expected = F.cross_entropy(model(images), labels, ignore_index=255)
    torch.testing.assert_close(task.loss(model, (images, labels)), expected)
    nothing = task.loss(model, (images, torch.full_like(labels, 255)))
    assert nothing == 0
    nothing.backward()


def test_whole_images_are_scored_at_one_scale_and_on_test_at_several(task, model):
    assert set(task.evaluate(model.train())) == {"miou", "mean_accuracy", "pixel_accuracy"}
    assert not model.training
    test = task.evaluate(model, split="test")
    with torch.no_grad():
        total = sum(
            confusion(probabilities(model, normalised(image), MULTI, WINDOWS).argmax(0), labels, 11)
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


def test_what_does_not_fit_is_refused(task, folder):
    with pytest.raises(AcutanceError, match=r"camvid has 11 classes, the model 12: set task\.model\.num_classes"):
        task_on(folder, model=replace(SEGMENTER, num_classes=12))
    with pytest.raises(AcutanceError, match=r"camvid has 8 images to train on, fewer than a batch of 9"):
        task.steps_per_epoch(9)
    assert task_on(folder, train_on="all").steps_per_epoch(9) == 1
