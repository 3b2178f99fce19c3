import gzip
import pickle

import numpy as np
import pytest
import torch
from tiny_data_sets import random_bytes, refused, write_cifar10, write_cifar100, write_fashion_mnist

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data import IMAGE_SETS, Images, digits, load_images
from acutance.lab.data.images import load_plain

WRITERS = {"cifar10": write_cifar10, "cifar100": write_cifar100, "fashion_mnist": write_fashion_mnist}


def test_cifar10_reads_its_files_in_order(tmp_path):
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


@pytest.mark.parametrize("compressed", [True, False])
def test_fashion_mnist_is_read_packed_or_not(compressed, tmp_path):
    write_fashion_mnist(tmp_path, compressed=compressed)
    for seed, split in enumerate(("all", "test")):
        images = load_images("fashion_mnist", tmp_path, split)
        assert np.array_equal(images.images[:, 0].numpy(), random_bytes(100, 28, 28, seed=seed))
        assert images.labels.tolist() == [i % 10 for i in range(100)]
    if compressed:
        path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
        body = gzip.decompress(path.read_bytes())
        for harm in (body[:-1], body + b"x", b"\1" + body[1:]):  # of another size or kind
            path.write_bytes(gzip.compress(harm))
            with refused("damaged", path):
                load_images("fashion_mnist", tmp_path, "train")


def test_digits_are_those_of_the_demo():
    for split, plain in zip(("all", "test"), digits(), strict=True):
        images = load_images("digits", None, split)
        assert torch.equal(images.labels, plain.labels)
        values = (images.images / 255 - images.mean[0]) / images.std[0]
        assert torch.allclose(values, plain.images, atol=1e-3)  # the demo divides by n − 1


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_train_and_val_part_the_training_set(name, tmp_path):
    WRITERS.get(name, lambda _: None)(tmp_path)
    train, val, both = (load_images(name, tmp_path, split) for split in ("train", "val", "all"))
    assert 0 < len(val) < len(train)
    rows = [tuple(image.flatten().tolist()) for part in (train, val) for image in part.images]
    assert sorted(rows) == sorted(tuple(image.flatten().tolist()) for image in both.images)
    assert (train.mean, train.std) == (both.mean, both.std)
    if name == "cifar100":
        assert both.classes == ("apple", "bear")  # as its file of names says


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
def test_pickles_of_something_else_are_refused(content, why, tmp_path):
    (write_cifar10(tmp_path) / "data_batch_1").write_bytes(pickle.dumps(content))
    with refused(why, "data_batch_1"):
        load_images("cifar10", tmp_path, "train")


def test_unknown_splits_and_images_of_another_type_are_refused():
    with pytest.raises(AcutanceError, match="train, val, all"):
        load_images("digits", None, "validation")
    with pytest.raises(ShapeError, match=r"\(2, 1, 3, 3\)"):
        Images("x", torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long), ("a",), (0.0,), (1.0,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_values_come_through_every_protocol(protocol):
    content = {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2, 3], b"name": b"\x00\xff"}
    stored = pickle.dumps(content, protocol)
    if protocol < 4:  # as old NumPy spelt it; later protocols state the length of a name
        stored = stored.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    loaded = load_plain(stored)
    assert np.array_equal(loaded[b"data"], content[b"data"])
    assert loaded[b"data"].dtype == np.uint8
    assert (loaded[b"labels"], loaded[b"name"]) == ([1, 2, 3], b"\x00\xff")


@pytest.mark.parametrize(
    "content",
    [b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n(S'x'\ntR.", b"c_codecs\nencode\n(Vx\nVrot13\ntR.", b"", b"junk"],
)
def test_other_names_and_junk_are_refused(content):
    with pytest.raises(pickle.UnpicklingError):
        load_plain(content)
