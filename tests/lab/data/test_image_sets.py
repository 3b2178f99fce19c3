import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_data_sets import random_bytes, write_cifar10, write_cifar100, write_fashion_mnist

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data import IMAGE_SETS, Images, digits, load_images

WRITERS: dict[str, Callable[..., Path]] = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "fashion_mnist": write_fashion_mnist,
}


def test_every_set_has_a_layout_tested_here() -> None:
    assert set(WRITERS) | {"digits"} == set(IMAGE_SETS)


def test_cifar10_reads_its_files_in_order(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    images = load_images("cifar10", tmp_path, "all")
    expected = np.concatenate([random_bytes(20, 3072, seed=seed) for seed in range(5)]).reshape(-1, 3, 32, 32)
    assert np.array_equal(images.images.numpy(), expected)
    assert images.labels.tolist() == [i % 10 for i in range(20)] * 5
    test = load_images("cifar10", tmp_path, "test")
    assert np.array_equal(test.images.numpy().reshape(20, -1), random_bytes(20, 3072, seed=5))
    assert (images.mean, images.std) == (test.mean, test.std)
    pixels = expected.astype(np.float64) / 255
    np.testing.assert_allclose(images.mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(images.std, pixels.std((0, 2, 3)), rtol=1e-12)


def test_cifar100_takes_names_from_meta(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    images = load_images("cifar100", tmp_path, "all")
    assert images.classes == ("apple", "bear")
    assert tuple(images.images.shape) == (40, 3, 32, 32)


@pytest.mark.parametrize("compressed", [True, False])
def test_fashion_mnist_is_read_packed_or_not(compressed: bool, tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, compressed=compressed)
    images = load_images("fashion_mnist", tmp_path, "all")
    assert np.array_equal(images.images[:, 0].numpy(), random_bytes(100, 28, 28, seed=0))
    assert images.labels.tolist() == [i % 10 for i in range(100)]
    assert np.array_equal(
        load_images("fashion_mnist", tmp_path, "test").images[:, 0].numpy(), random_bytes(100, 28, 28, seed=1)
    )


def test_digits_are_those_of_the_demo() -> None:
    for split, plain in zip(("all", "test"), digits(), strict=True):
        images = load_images("digits", None, split)
        assert torch.equal(images.labels, plain.labels)
        values = (images.images / 255 - images.mean[0]) / images.std[0]
        assert torch.allclose(values, plain.images, atol=1e-3)  # the demo divides by n − 1


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_train_and_val_part_the_training_set(name: str, tmp_path: Path) -> None:
    if name in WRITERS:
        WRITERS[name](tmp_path)
    train, val, both = (load_images(name, tmp_path, split) for split in ("train", "val", "all"))
    assert len(val) > 0
    assert len(train) + len(val) == len(both)
    rows = [tuple(image.flatten().tolist()) for part in (train, val) for image in part.images]
    assert sorted(rows) == sorted(tuple(image.flatten().tolist()) for image in both.images)
    assert (train.mean, train.std) == (both.mean, both.std)


@pytest.mark.parametrize("name", WRITERS)
def test_missing_folders_say_where_what_and_how(name: str, tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match=r"looked for .*; expected .*\. Get ") as caught:
        load_images(name, tmp_path, "train")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(AcutanceError, match="--data-dir"):
        load_images(name, None, "train")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "data_batch_2"),
        ("cifar100", "train"),
        ("cifar100", "meta"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "train-labels-idx1-ubyte.gz"),
    ],
)
@pytest.mark.parametrize("harm", ["absent", "short", "empty"])
def test_missing_and_damaged_files_are_named(name: str, file: str, harm: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path) / file
    content = path.read_bytes()
    path.unlink()
    if harm != "absent":
        path.write_bytes(content[: len(content) // 2] if harm == "short" else b"")
    told = str(path).removesuffix(".gz") if harm == "absent" else str(path)
    with pytest.raises(AcutanceError, match="not there" if harm == "absent" else "is damaged") as caught:
        load_images(name, tmp_path, "train")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({b"data": random_bytes(2, 3072)}, "no 'labels'"),
        ({b"data": random_bytes(2, 3072), b"labels": [1]}, "2 images"),
        ({b"data": random_bytes(2, 100), b"labels": [1, 2]}, r"\(2, 100\)"),
        ({b"data": [1, 2], b"labels": [1, 2]}, "list"),
        ({b"data": random_bytes(2, 3072), b"labels": [1, 10]}, "from 1 to 10"),
        ([1, 2], "no 'data'"),
    ],
)
def test_pickles_of_something_else_are_refused(content: Any, why: str, tmp_path: Path) -> None:
    (write_cifar10(tmp_path) / "data_batch_1").write_bytes(pickle.dumps(content))
    with pytest.raises(AcutanceError, match=why):
        load_images("cifar10", tmp_path, "train")


@pytest.mark.parametrize("harm", [lambda body: body[:-1], lambda body: body + b"x", lambda body: b"\1" + body[1:]])
def test_idx_files_of_another_size_or_kind_are_refused(harm: Any, tmp_path: Path) -> None:
    path = write_fashion_mnist(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(harm(gzip.decompress(path.read_bytes()))))
    with pytest.raises(AcutanceError, match="damaged"):
        load_images("fashion_mnist", tmp_path, "train")


def test_unknown_names_and_splits_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match=r"cifar1000.*cifar10, cifar100, digits, fashion_mnist"):
        load_images("cifar1000", tmp_path, "train")
    with pytest.raises(AcutanceError, match="train, val, all"):
        load_images("digits", None, "validation")  # type: ignore[arg-type]


def test_images_must_be_bytes_with_a_label_each() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 1, 3, 3\)"):
        Images("x", torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long), ("a",), (0.0,), (1.0,))
