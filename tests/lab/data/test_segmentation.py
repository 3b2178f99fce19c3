import colorsys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data_sets import random_bytes, write_ade20k, write_camvid

from acutance.errors import AcutanceError
from acutance.lab.data import load_segmentation
from acutance.lab.data import segmentation_augment as sa
from acutance.lab.data.segmentation import IGNORED
from acutance.lab.data.stream import training_batches

WRITERS: dict[str, Callable[[Path], Path]] = {"camvid": write_camvid, "ade20k": write_ade20k}


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_camvid_keeps_eleven_classes_and_ignores_the_twelfth(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    frames = load_segmentation("camvid", tmp_path, "val")
    image, label = frames[1]
    assert np.array_equal(image.numpy().transpose(1, 2, 0), random_bytes(18, 24, 3, seed=11))
    stored = torch.from_numpy(random_bytes(18, 24, seed=11) % 12).long()
    assert torch.equal(label, torch.where(stored == 11, IGNORED, stored))
    assert len(frames.classes) == 11
    assert [len(load_segmentation("camvid", tmp_path, split)) for split in ("train", "all", "test")] == [4, 8, 4]


@pytest.mark.parametrize("names", [True, False])
def test_ade20k_ignores_zero_and_counts_from_there(names: bool, tmp_path: Path) -> None:
    write_ade20k(tmp_path, names=names)
    images = load_segmentation("ade20k", tmp_path, "all")
    _, label = images[3]
    stored = torch.from_numpy(random_bytes(16, 20, seed=3) % 151).long()
    assert torch.equal(label, torch.where(stored == 0, IGNORED, stored - 1))
    assert images.classes[:2] == (("thing 1", "thing 2") if names else ("1", "2"))
    assert len(images.classes) == 150


def test_ade20k_holds_out_every_twentieth_training_image(tmp_path: Path) -> None:
    write_ade20k(tmp_path)
    train, val, both = (load_segmentation("ade20k", tmp_path, split).paths for split in ("train", "val", "all"))
    assert val == (both[19], both[39])
    assert set(train) | set(val) == set(both)
    assert len(train) == 38
    assert "validation" in str(load_segmentation("ade20k", tmp_path, "test").paths[0])


@pytest.mark.parametrize("name", WRITERS)
def test_missing_folders_say_where_what_and_how(name: str, tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match=r"looked for .*; expected .*https?://") as caught:
        load_segmentation(name, tmp_path, "train")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_missing_and_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    image, label = load_segmentation(name, tmp_path, "train").paths[0]
    whole = label.read_bytes()
    for content, why in ((whole[: len(whole) // 2], "damaged"), (b"", "damaged"), (None, "not there")):
        label.unlink()
        if content is not None:
            label.write_bytes(content)
        with pytest.raises(AcutanceError, match=why) as caught:
            load_segmentation(name, tmp_path, "train")[0]
        assert str(label) in str(caught.value)
        assert "\n" not in str(caught.value)
    label.write_bytes(whole)
    image.write_bytes(image.read_bytes()[:100])
    with pytest.raises(AcutanceError, match="damaged") as caught:
        load_segmentation(name, tmp_path, "train")[0]
    assert str(image) in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_labels_of_another_size_or_value_are_refused(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    images = load_segmentation(name, tmp_path, "train")
    shape = tuple(images[0][1].shape)
    Image.fromarray(np.full(shape, 200, np.uint8)).save(images.paths[0][1])
    with pytest.raises(AcutanceError, match="a value of 200"):
        images[0]
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(images.paths[0][1])
    with pytest.raises(AcutanceError, match=r"shape \(3, 3\)"):
        images[0]


def test_unknown_names_and_splits_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match="ade20k, camvid"):
        load_segmentation("cityscapes", tmp_path, "train")
    with pytest.raises(AcutanceError, match="train, val, all"):
        load_segmentation("camvid", tmp_path, "validation")  # type: ignore[arg-type]


def test_rescaling_keeps_proportions_within_both_sides() -> None:
    image, label = random_bytes(3, 300, 400), (random_bytes(300, 400) % 5).astype(np.int64)
    for sides, expected in (((2048, 512), (512, 683)), ((1024, 256), (256, 341)), ((500, 480), (375, 500))):
        scaled, classes = sa.rescale(image, label, sides)
        assert scaled.shape == (3, *expected)
        assert classes.shape == expected
        assert set(np.unique(classes)) <= set(range(5))


def test_crops_avoid_windows_of_one_class() -> None:
    label = np.zeros((40, 40), np.int64)
    label[:, 30:] = 1  # only windows that reach well into it are varied
    image = np.broadcast_to(label.astype(np.uint8), (3, 40, 40))
    shares = []
    for seed in range(40):
        window, classes = sa.random_crop(image, label, 20, random(seed))
        assert np.array_equal(window[0], classes)
        shares.append(sa.is_varied(classes))
    assert np.mean(shares) > 0.95  # a single draw would succeed in about a quarter of the cases


def test_varied_means_two_classes_and_none_over_three_quarters() -> None:
    assert not sa.is_varied(np.zeros((2, 2), np.int64))
    assert not sa.is_varied(np.array([[0, 0], [0, 1]]))  # exactly three quarters is too much
    assert sa.is_varied(np.array([[0, 0], [1, 1]]))
    assert sa.is_varied(np.array([[0, 1], [IGNORED, IGNORED]]))
    assert not sa.is_varied(np.full((2, 2), IGNORED))


def test_hue_and_saturation_are_those_of_colorsys() -> None:
    image = random_bytes(3, 8, 9, seed=4).astype(np.float32)
    image[:, 0, 0] = 90  # a grey
    image[:, 0, 1] = 0
    for degrees in (-36.0, 0.0, 20.0):
        turned = sa.turn_hue(image, degrees)
        for place in np.ndindex(8, 9):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[:, *place] / 255.0).tolist())
            expected = colorsys.hsv_to_rgb((hue + degrees / 360) % 1, saturation, value)
            np.testing.assert_allclose(turned[:, *place] / 255, expected, atol=1e-5)
    for factor in (0.5, 1.5):
        changed = sa.saturate(image, factor)
        for place in np.ndindex(8, 9):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[:, *place] / 255.0).tolist())
            expected = colorsys.hsv_to_rgb(hue, min(1, saturation * factor), value)
            np.testing.assert_allclose(changed[:, *place] / 255, expected, atol=1e-5)


def test_photometric_distortion_moves_colours_and_keeps_places() -> None:
    flat = np.full((3, 6, 6), 100, np.uint8)
    results = [sa.photometric(flat, random(seed)) for seed in range(60)]
    for result in results:
        assert result.dtype == np.uint8
        assert (result == result[:, :1, :1]).all()
    levels = np.array([result[0, 0, 0] for result in results]).astype(int)
    assert levels.min() < 80
    assert levels.max() > 120
    assert (levels == 100).any()  # each change has a probability of one half


def test_training_crops_fill_what_an_image_does_not_reach(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    frames = load_segmentation("camvid", tmp_path, "train")
    crops = sa.SegmentationCrops(frames, 64, (24, 18), fill=(9, 8, 7))
    image, label = crops.sample(0, random())
    assert image.shape == (3, 64, 64)
    assert label.shape == (64, 64)
    assert (label[40:] == IGNORED).all()
    assert (image[:, 40:] == np.array([9, 8, 7])[:, None, None]).all()


def test_crops_come_in_batches_that_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    crops = sa.SegmentationCrops(load_segmentation("camvid", tmp_path, "train"), 16, (24, 18))

    def first(steps: int, **options: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stream = training_batches(crops, lambda epoch: torch.arange(4), batch_size=2, seed=3, **options)
        return [next(stream) for _ in range(steps)]

    whole, later = first(4), first(2, first_step=2)
    for (images, labels), (same, too) in zip(whole[2:], later, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(labels, too)
    assert labels.dtype == torch.long
    assert not torch.equal(whole[0][0], whole[2][0])
