"""Whatever the data set: a file that is missing, damaged or hostile is named in one line."""

import os
import pickle

import pytest
from tiny_data_sets import (
    refused,
    write_ade20k,
    write_camvid,
    write_cifar10,
    write_cifar100,
    write_fashion_mnist,
    write_wikitext2,
)

from acutance.lab.data import CORPORA, IMAGE_SETS, load_corpus, load_images, load_segmentation

WRITERS = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "fashion_mnist": write_fashion_mnist,
    "camvid": write_camvid,
    "ade20k": write_ade20k,
    "wikitext-2": write_wikitext2,
}


def load(name, folder):
    """And read what is read when it is wanted only."""
    if name in CORPORA:
        return load_corpus(name, folder)
    return load_images(name, folder, "train") if name in IMAGE_SETS else load_segmentation(name, folder, "train")[0]


class Malicious:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "data_batch_2"),
        ("cifar100", "train"),
        ("cifar100", "meta"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "train-labels-idx1-ubyte.gz"),
        ("camvid", "train/0.png"),
        ("camvid", "trainannot/0.png"),
        ("ade20k", "images/training/ADE_train_00000000.jpg"),
        ("ade20k", "annotations/training/ADE_train_00000000.png"),
        ("wikitext-2", "wiki.valid.tokens"),
    ],
)
def test_missing_damaged_and_malicious_files_are_named(name, file, tmp_path):
    with refused("--data-dir", name):
        load(name, None)
    with refused(r"looked for .*; expected .*https?://", tmp_path):
        load(name, tmp_path)
    path, made = WRITERS[name](tmp_path) / file, tmp_path / "made_by_the_pickle"
    content = path.read_bytes()
    half = b"\xff\xfe broken" if name in CORPORA else content[: len(content) // 2]
    for harm in (half, b"", pickle.dumps({b"data": Malicious(made)})):
        path.write_bytes(harm)
        with refused("is damaged", path):
            load(name, tmp_path)
    if name.startswith("cifar"):
        with refused(r"mkdir.*it was not run.*Get https://", path):
            load(name, tmp_path)
    assert not made.exists()
    path.unlink()
    if path.parent.name not in ("train", "training") or "annot" in file:  # an image less is a smaller set
        with refused("not there", str(path).removesuffix(".gz")):
            load(name, tmp_path)


@pytest.mark.parametrize(
    ("loader", "name", "words"),
    [
        (load_images, "cifar1000", "cifar10, cifar100, digits, fashion_mnist"),
        (load_segmentation, "cityscapes", "ade20k, camvid"),
        (load_corpus, "text8", "wikitext-103, wikitext-2"),
    ],
)
def test_unknown_names_list_the_known_ones(loader, name, words, tmp_path):
    with refused(words, name):
        loader(name, tmp_path, *["train"] * (loader is not load_corpus))
