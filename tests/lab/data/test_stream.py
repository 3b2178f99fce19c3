import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data_sets import add_member, picture, write_imagenet, write_shards
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.io import loading
from acutance.lab.data.decoding import centre_crop, random_part, random_resized_crop
from acutance.lab.data.folder import Crops, ImageFolder
from acutance.lab.data.shards import SHARDS_AT_ONCE, WebShards, expand
from acutance.lab.data.stream import evaluation_batches, repeated, training_batches

SEED = 5


@pytest.fixture(params=["folder", "shards"])
def images(request: pytest.FixtureRequest, tmp_path: Path) -> ImageFolder | WebShards:
    if request.param == "folder":
        return ImageFolder(write_imagenet(tmp_path), "all")
    return WebShards(write_shards(tmp_path), "all")


def batches(images: Any, count: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    stream = training_batches(
        Crops(images, 16), lambda epoch: images.order(SEED, epoch), batch_size=8, seed=SEED, **options
    )
    return [next(stream) for _ in range(count)]


def assert_same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    for (images, labels), (same, too) in zip(one, other, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(labels, too)


def test_batches_start_at_any_step(images: Any) -> None:
    assert_same(batches(images, 5)[3:], batches(images, 2, first_step=3))  # step 3 is in the second epoch


def test_shares_are_rows_of_the_global_batch(images: Any) -> None:
    whole = batches(images, 2)
    for rows in (slice(0, 4), slice(4, 8)):
        assert_same([(x[rows], y[rows]) for x, y in whole], batches(images, 2, rows=rows))


def test_worker_processes_change_nothing(images: Any) -> None:
    assert_same(batches(images, 3), batches(images, 3, workers=2))


def test_an_epoch_visits_everything_and_a_sample_differs_from_epoch_to_epoch(images: Any) -> None:
    for epoch in range(2):
        assert images.order(SEED, epoch).sort().values.tolist() == list(range(len(images)))
    assert images.order(SEED, 0).tolist() != images.order(SEED, 1).tolist()
    crops = Crops(images, 16)
    one, other = (crops.sample(0, np.random.default_rng(seed))[0] for seed in (1, 2))
    assert not np.array_equal(one, other)
    stream = training_batches(crops, lambda epoch: torch.arange(8), batch_size=8, seed=SEED)
    first, second = (next(stream)[0] for _ in range(2))  # the same samples in two epochs
    assert not any(map(torch.equal, first, second))


def test_evaluation_sees_everything_in_order_once(images: Any) -> None:
    found = list(evaluation_batches(Crops(images, 16), batch_size=7))
    assert torch.equal(torch.cat([labels for _, labels in found]), images.labels)
    first = np.asarray(centre_crop(images.read(0), 16)).transpose(2, 0, 1)
    assert np.array_equal(found[0][0][0].numpy(), first)
    some = list(evaluation_batches(Crops(images, 16), batch_size=7, indices=[2, 4]))
    assert torch.equal(some[0][0], found[0][0][[2, 4]])


def test_too_large_a_batch_is_refused(images: Any) -> None:
    with pytest.raises(AcutanceError, match="fewer than a batch of 99"):
        next(training_batches(Crops(images), lambda epoch: images.order(0, epoch), batch_size=99, seed=0))


def test_splits_of_a_folder(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    train, val, both = (ImageFolder(tmp_path, split, every=3) for split in ("train", "val", "all"))
    assert [path.name for path in val.paths] == ["image_2.JPEG", "image_5.JPEG"] * 3
    assert val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert set(train.paths) | set(val.paths) == set(both.paths)
    assert len(both) == 18
    assert train.classes == ("n00000000", "n00000001", "n00000002")
    test = ImageFolder(tmp_path, "test")
    assert test.paths[0].parts[-3] == "val"
    assert ImageFolder(tmp_path / "val", None).paths == test.paths
    with pytest.raises(AcutanceError, match=r"lower task\.held_out_every"):
        ImageFolder(tmp_path, "val")


def test_splits_of_shards(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path)
    train, val, both = (WebShards(pattern, split, every=3) for split in ("train", "val", "all"))
    assert len(train) + len(val) == len(both) == 20
    assert val.labels.tolist() == [both.labels[i] for i in range(20) if (i // 3) % 3 == 2]
    assert np.array_equal(np.asarray(both.read(7)), np.asarray(picture(40, 30, 7)))
    assert both.labels[7] == 7 % 3
    assert len(WebShards(str(tmp_path / "part-*.tar"))) == 20


def test_shards_are_read_group_by_group(tmp_path: Path) -> None:
    shards = WebShards(write_shards(tmp_path, shards=2 * SHARDS_AT_ONCE, per_shard=2))
    group = (shards.order(0, 0) // 2).view(2, -1)  # which shard each image of each half is in
    assert len(group[0].unique()) == len(group[1].unique()) == SHARDS_AT_ONCE
    assert not set(group[0].tolist()) & set(group[1].tolist())


def test_patterns_name_their_files(tmp_path: Path) -> None:
    for number in range(8, 12):
        (tmp_path / f"a-{number:03d}.tar").touch()
    assert [path.name for path in expand(f"{tmp_path}/a-{{009..011}}.tar")] == ["a-009.tar", "a-010.tar", "a-011.tar"]
    with pytest.raises(AcutanceError, match=r"looked for .*a-012\.tar"):
        list(expand(f"{tmp_path}/a-{{011..012}}.tar"))


def test_repetitions_share_a_batch_but_no_pair() -> None:
    order = torch.randperm(48)
    chosen = repeated(order, 12).view(4, 12)
    for number, batch in enumerate(chosen):
        assert sorted(batch.tolist()) == sorted(order[number * 4 : number * 4 + 4].tolist() * 3)
        assert (batch[::2] != batch[1::2]).all()
    odd = repeated(torch.arange(100), 16).view(-1, 16)  # 16 is no multiple of 3
    assert len(odd) == 6
    assert (odd[:, ::2] != odd[:, 1::2]).all()
    assert odd.flatten().bincount().max() == 3


def test_random_parts_lie_inside_with_the_stated_areas_and_shapes() -> None:
    parts = np.array([random_part(100, 80, np.random.default_rng(seed)) for seed in range(500)])
    left, top, width, height = parts.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= 100).all()
    assert (top + height <= 80).all()
    area, aspect = width * height / 8000, width / height
    assert area.min() > 0.07
    assert area.max() > 0.8
    assert aspect.min() > 0.72
    assert aspect.max() < 1.39
    assert random_part(1000, 2, np.random.default_rng(0)) == (498, 0, 3, 2)  # nothing fits: the middle


def test_crops_are_pillows() -> None:
    image = picture(60, 40, 0)
    left, top, width, height = random_part(60, 40, np.random.default_rng(3))
    part = image.crop((left, top, left + width, top + height)).resize((16, 16), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(random_resized_crop(image, 16, np.random.default_rng(3))), np.asarray(part))
    assert centre_crop(image, 14).size == (14, 14)
    scaled = image.resize((384, 256), Image.Resampling.BICUBIC).crop((80, 16, 304, 240))
    assert np.array_equal(np.asarray(centre_crop(image, 224)), np.asarray(scaled))


@pytest.mark.parametrize("size", [(60, 40), (41, 77)])
def test_training_and_measuring_cut_the_same_middle(size: tuple[int, int]) -> None:
    image = picture(*size, 0)
    measured = loading.images.centre_crop((224, 224), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), fraction=224 / 256)([image])
    assert np.array_equal(np.asarray(centre_crop(image, 224)).transpose(2, 0, 1), (255 * measured[0]).round().numpy())


@pytest.mark.parametrize("split", ["train", "test"])
def test_missing_folders_say_where_what_and_how(split: Any, tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match=r"looked for .*; expected .*https://image-net.org") as caught:
        ImageFolder(tmp_path, split)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "train" / "n1").mkdir(parents=True)
    (tmp_path / "val" / "n1").mkdir(parents=True)
    with pytest.raises(AcutanceError, match="looked for"):
        ImageFolder(tmp_path, split)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_one_clear_line_also_from_a_worker(workers: int, tmp_path: Path) -> None:
    folder = ImageFolder(write_imagenet(tmp_path), "all")
    path = folder.paths[4]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(AcutanceError, match="is damaged") as caught:
        list(evaluation_batches(Crops(folder), batch_size=4, workers=workers))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def without_label(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        content = io.BytesIO()
        picture(4, 4, 0).save(content, "PNG")
        add_member(archive, "a.png", content.getvalue())


def with_label(label: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        without_label(path)
        with tarfile.open(path, "a") as archive:
            add_member(archive, "a.cls", label)

    return write


@pytest.mark.parametrize(
    "harm",
    [
        without_label,
        with_label(b"cat"),
        with_label(b"-1"),
        lambda path: path.write_bytes(path.read_bytes()[:1500]),
        lambda path: path.write_bytes(b"junk" * 300),
        lambda path: tarfile.open(path, "w").close(),
    ],
)
def test_damaged_shards_are_named(harm: Callable[[Path], Any], tmp_path: Path) -> None:
    pattern = write_shards(tmp_path)
    path = tmp_path / "part-000002.tar"
    harm(path)
    with pytest.raises(AcutanceError, match="is damaged") as caught:
        WebShards(pattern)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_shards_say_where_what_and_how(tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match=r"looked for .*part-000000.tar.*expected .*webdataset"):
        WebShards(str(tmp_path / "part-{000000..000003}.tar"))
