import colorsys

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data_sets import WRITERS, random_bytes, refused, write_camvid

import standins
from acutance.lab.data import load_segmentation
from acutance.lab.data import segmentation as sa
from acutance.lab.data.segmentation import IGNORED
from acutance.lab.data.stream import training_batches


def test_camvid_keeps_eleven_classes_and_ignores_the_twelfth(tmp_path):
    folder = write_camvid(tmp_path)
    frames = load_segmentation("camvid", tmp_path, "val")
    image, label = frames[1]
    seen, stored = (np.asarray(Image.open(folder / part / "1.png")) for part in ("val", "valannot"))
    assert np.array_equal(image.numpy().transpose(1, 2, 0), seen)
    assert np.array_equal(label.numpy(), np.where(stored == 11, IGNORED, stored))
    assert (label == IGNORED).any()
    assert len(frames.classes) == 11
    assert [len(load_segmentation("camvid", tmp_path, split)) for split in ("train", "all", "test")] == [8, 11, 3]


@pytest.mark.parametrize("names", [True, False])
def test_ade20k_ignores_zero_and_holds_out_every_twentieth(names, tmp_path):
    folder = standins.ade20k(tmp_path) / "ADEChallengeData2016"
    if names:
        rows = [f"{i}\t0.1\t10\t1\t0\tthing {i}, object {i}" for i in range(1, 151)]
        (folder / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
    train, val, both, test = (load_segmentation("ade20k", tmp_path, split) for split in ("train", "val", "all", "test"))
    stored = random_bytes(standins.SIDE, standins.SIDE) % 151
    Image.fromarray(stored).save(both.paths[3][1])
    assert torch.equal(both[3][1], torch.from_numpy(np.where(stored == 0, IGNORED, stored - 1.0)).long())
    assert both.classes[:2] == (("thing 1", "thing 2") if names else ("1", "2"))
    assert len(both.classes) == 150
    assert val.paths == (both.paths[19],)
    assert set(train.paths) == set(both.paths) - set(val.paths)
    assert "validation" in str(test.paths[0])


@pytest.mark.parametrize("name", ["camvid", "ade20k"])
def test_labels_of_another_size_or_value_are_refused(name, tmp_path):
    WRITERS[name](tmp_path)
    images = load_segmentation(name, tmp_path, "train")
    shape = tuple(images[0][1].shape)
    for label, why in ((np.full(shape, 200), "a value of 200"), (np.zeros((3, 3)), r"shape \(3, 3\)")):
        Image.fromarray(label.astype(np.uint8)).save(images.paths[0][1])
        with refused(why):
            images[0]


def test_rescaling_keeps_proportions_within_both_sides():
    image, label = random_bytes(3, 300, 400), (random_bytes(300, 400) % 5).astype(np.int64)
    for sides, expected in (((2048, 512), (512, 683)), ((1024, 256), (256, 341)), ((500, 480), (375, 500))):
        scaled, classes = sa.rescale(image, label, sides)
        assert scaled.shape == (3, *expected)
        assert classes.shape == expected
        assert set(np.unique(classes)) <= set(range(5))


def test_crops_avoid_windows_of_one_class():
    """Varied are two classes of which none has three quarters of what is labelled."""
    assert sa.is_varied(np.array([[0, 0], [1, 1]]))
    assert sa.is_varied(np.array([[0, 1], [IGNORED, IGNORED]]))
    for single in ([[0, 0], [0, 0]], [[0, 0], [0, 1]], 2 * [[IGNORED] * 2]):
        assert not sa.is_varied(np.array(single))
    label = np.zeros((40, 40), np.int64)
    label[:, 30:] = 1  # only windows that reach well into it are varied
    image = np.broadcast_to(label.astype(np.uint8), (3, 40, 40))
    crops = [sa.random_crop(image, label, 20, np.random.default_rng(seed)) for seed in range(40)]
    assert all(np.array_equal(window[0], classes) for window, classes in crops)
    assert np.mean([sa.is_varied(classes) for _, classes in crops]) > 0.95  # a single draw succeeds in about a quarter


def test_hue_and_saturation_are_those_of_colorsys():
    image = random_bytes(3, 8, 9, seed=4).astype(np.float32)
    image[:, 0, 0] = 90  # a grey
    image[:, 0, 1] = 0
    cases = [(sa.turn_hue(image, degrees), degrees, 1.0) for degrees in (-36.0, 0.0, 20.0)]
    cases += [(sa.saturate(image, factor), 0.0, factor) for factor in (0.5, 1.5)]
    for changed, degrees, factor in cases:
        for place in np.ndindex(8, 9):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[:, *place] / 255.0).tolist())
            expected = colorsys.hsv_to_rgb((hue + degrees / 360) % 1, min(1, saturation * factor), value)
            np.testing.assert_allclose(changed[:, *place] / 255, expected, atol=1e-5)


def test_photometric_distortion_moves_colours_and_keeps_places():
    flat = np.full((3, 6, 6), 100, np.uint8)
    results = np.stack([sa.photometric(flat, np.random.default_rng(seed)) for seed in range(60)])
    assert results.dtype == np.uint8
    assert (results == results[..., :1, :1]).all()
    levels = results[:, 0, 0, 0]
    assert levels.min() < 80
    assert levels.max() > 120
    assert (levels == 100).any()  # each change has a probability of one half


def test_training_crops_fill_what_an_image_does_not_reach(tmp_path):
    write_camvid(tmp_path)
    crops = sa.SegmentationCrops(load_segmentation("camvid", tmp_path, "train"), 64, (24, 18))
    image, label = crops.sample(0, np.random.default_rng(0))
    assert (image.shape, label.shape) == ((3, 64, 64), (64, 64))
    assert (label[40:] == IGNORED).all()
    assert (image[:, 40:] == np.array(sa.MEAN_COLOUR)[:, None, None]).all()
    images, labels = next(training_batches(crops, lambda epoch: torch.arange(4), batch_size=2, seed=3))
    assert (images.shape, labels.shape, labels.dtype) == ((2, 3, 64, 64), (2, 64, 64), torch.long)
