"""Segmentation on a tiny CamVid: what a batch is, the loss, and the scores of whole images."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from acutance.errors import AcutanceError
from acutance.io.saving import save
from acutance.lab.tasks import BatchSlice, config_class, task_class
from acutance.lab.tasks.segmentation import ADE20K, CAMVID, SegmentationConfig, SegmentationTask, normalised
from acutance.lab.tasks.windows import MULTI, WindowConfig, confusion, probabilities, scores
from acutance.lab.train.config import Config
from acutance.models import SegmenterConfig, ViT

Image = pytest.importorskip("PIL.Image")
MODEL = SegmenterConfig(
    num_classes=11, image_size=16, patch_size=4, dim=12, depth=2, heads=3, decoder_heads=2, drop_path=0.0
)
WINDOWS = WindowConfig(short_side=18, size=16, stride=12, at_once=3)
SIZES = {"train": [(18, 24)] * 5, "val": [(18, 24), (20, 24)], "test": [(18, 24), (18, 30), (25, 18)]}


def write_camvid(folder):
    """Its layout, with images that differ in size and labels that follow the colour, void (11) among them."""
    random = np.random.default_rng(0)
    for split, sizes in SIZES.items():
        for place in (split, f"{split}annot"):
            (folder / "CamVid" / place).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes):
            labels = np.kron(random.integers(0, 12, (height // 3 + 1, width // 3 + 1)), np.ones((3, 3)))
            labels = labels[:height, :width].astype(np.uint8)
            image = np.stack([labels * 20, 255 - labels * 20, labels * 7], axis=-1).astype(np.uint8)
            Image.fromarray(image).save(folder / "CamVid" / split / f"{number}.png")
            Image.fromarray(labels).save(folder / "CamVid" / f"{split}annot" / f"{number}.png")


def task_on(folder, **options):
    config = {"dataset": "camvid", "model": MODEL, "data_dir": str(folder), "windows": WINDOWS, **options}
    return SegmentationTask(SegmentationConfig(**config), seed=0, device=torch.device("cpu"))


@pytest.fixture
def task(tmp_path):
    write_camvid(tmp_path)
    return task_on(tmp_path)


def spread(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def test_it_is_registered_and_its_configuration_survives_json():
    assert task_class("segmentation") is SegmentationTask
    assert config_class("segmentation") is SegmentationConfig
    for task in (ADE20K, CAMVID):
        config = Config(task=task)
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_ade20k_is_read_as_in_the_public_code():
    assert (ADE20K.windows.short_side, ADE20K.windows.size, ADE20K.windows.stride) == (512, 512, 480)
    assert (ADE20K.model.image_size, ADE20K.model.dim, ADE20K.model.depth) == (512, 192, 12)


def test_batches_are_normalised_crops_with_their_labels(task):
    images, labels = next(task.batches(2, 0, BatchSlice()))
    assert images.shape == (2, 3, 16, 16)
    assert images.dtype == torch.float32
    assert labels.shape == (2, 16, 16)
    assert labels.dtype == torch.int64
    assert set(labels.unique().tolist()) <= {*range(11), 255}
    assert images.abs().max() < 3
    assert task.steps_per_epoch(2) == 2


def test_a_batch_depends_on_its_step_alone_and_shares_make_up_the_whole(task):
    made = task.batches(2, 0, BatchSlice())
    first = [next(made) for _ in range(5)]
    for step in (0, 1, 4):
        for entry in (0, 1):
            assert torch.equal(next(task.batches(2, step, BatchSlice()))[entry], first[step][entry])
            parts = [next(task.batches(2, step, BatchSlice(i, 2)))[entry] for i in range(2)]
            assert torch.equal(torch.cat(parts), first[step][entry])
    assert not torch.equal(first[0][0], first[2][0])


def test_the_loss_counts_labelled_pixels_only(task):
    model = spread(task.build_model()).eval()
    images, labels = next(task.batches(4, 0, BatchSlice()))
    assert (labels == 255).any()
    expected = F.cross_entropy(model(images), labels, ignore_index=255)
    torch.testing.assert_close(task.loss(model, (images, labels)), expected)
    nothing = task.loss(model, (images, torch.full_like(labels, 255)))
    assert nothing == 0
    nothing.backward()


def test_whole_images_are_scored_at_one_scale_and_on_test_at_several(task):
    model = spread(task.build_model())
    val = task.evaluate(model)
    assert not model.training
    assert set(val) == {"miou", "mean_accuracy", "pixel_accuracy"}
    test = task.evaluate(model, split="test")
    assert {"miou", "miou_ms"} <= set(test)
    from acutance.lab.data import load_segmentation

    with torch.no_grad():
        total = sum(
            confusion(probabilities(model, normalised(image), MULTI, WINDOWS).argmax(0), labels, 11)
            for image, labels in load_segmentation("camvid", task.config.data_dir, "test")
        )
    assert test["miou_ms"] == pytest.approx(scores(total)["miou"], abs=1e-9)
    with pytest.raises(AcutanceError, match="no split 'dev'"):
        task.evaluate(model, split="dev")


def test_a_perfect_model_scores_100(task):
    class Oracle(torch.nn.Module):
        """Reads the label off the colour; windows that are not resized keep it."""

        def forward(self, images):
            red = images[:, 0] * 58.395 + 123.675
            return -50 * (red[:, None] / 20 - torch.arange(11.0)[:, None, None]).abs()

    pictures = [(image.shape[1], image.shape[2]) for image, _ in task._train]
    assert set(pictures) == {(18, 24)}  # the short side is that of the windows: nothing is resized
    found = task.evaluate(Oracle(), split="train")
    assert found == {"miou": 100.0, "mean_accuracy": 100.0, "pixel_accuracy": 100.0}


def test_a_mitigation_is_installed_in_both_parts_after_the_encoders_weights(task, tmp_path):
    torch.manual_seed(3)
    vit = ViT(image_size=8, patch_size=4, dim=12, depth=2, heads=3, num_classes=7)
    path = save(vit, tmp_path / "vit.safetensors")
    model_config = SegmenterConfig(**{**MODEL.to_dict(), "mitigation": "neutreno:0.6,learn=head"})
    model = task_on(tmp_path, model=model_config, encoder_weights=str(path)).build_model()
    assert model.config == model_config
    assert torch.equal(model.encoder.blocks[1].attn.qkv.weight, vit.blocks[1].attn.qkv.weight)


def test_the_probe_is_what_the_model_takes(task):
    assert task.build_model()(task.probe()).shape == (2, 11, 16, 16)


def test_what_does_not_fit_is_refused(task, tmp_path):
    other = SegmenterConfig(**{**MODEL.to_dict(), "num_classes": 12})
    with pytest.raises(AcutanceError, match=r"camvid has 11 classes, the model 12: set task\.model\.num_classes"):
        task_on(tmp_path, model=other)
    with pytest.raises(AcutanceError, match=r"camvid has 5 images to train on, fewer than a batch of 6"):
        task.steps_per_epoch(6)
    assert task_on(tmp_path, train_on="all").steps_per_epoch(7) == 1


def test_a_few_steps_fit_a_batch(task):
    torch.manual_seed(0)
    model = task.build_model().train()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = next(task.batches(2, 0, BatchSlice()))
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
