"""Data sets in memory and texts: what is read, how it is split, and that harmed files are named in one line."""

import gzip
import itertools
import pickle

import numpy as np
import pytest
import torch
from tiny_data_sets import WRITERS, random_bytes, refused, write_cifar10, write_fashion_mnist, write_wikitext2

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data import CORPORA, IMAGE_SETS, digits, fraction, held_out, load_corpus, load_images
from acutance.lab.data.images import Images, load_plain
from acutance.lab.data.seeds import generator, mixed_seed
from acutance.lab.data.segmentation import load_segmentation

LABELS = torch.randint(7, (400,), generator=torch.Generator().manual_seed(0))
BY_CLASS = [(label == LABELS).nonzero()[:, 0] for label in range(7)]


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
    np.testing.assert_allclose([images.mean, images.std], [pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))], rtol=1e-12)


@pytest.mark.parametrize("compressed", [True, False])
def test_fashion_mnist_is_read_packed_or_not(compressed, tmp_path):
    path = write_fashion_mnist(tmp_path, compressed=compressed) / "train-images-idx3-ubyte.gz"
    for seed, split in enumerate(("all", "test")):
        images = load_images("fashion_mnist", tmp_path, split)
        assert np.array_equal(images.images[:, 0].numpy(), random_bytes(100, 28, 28, seed=seed))
        assert images.labels.tolist() == [i % 10 for i in range(100)]
    body = gzip.decompress(path.read_bytes()) if compressed else b""
    for harm in (body[:-1], body + b"x", b"\1" + body[1:]) if compressed else ():  # of another size or kind
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
    assert name != "cifar100" or both.classes == ("apple", "bear")  # as its file of names says


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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_values_come_through_every_protocol(protocol):
    content = {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2, 3], b"name": b"\x00\xff"}
    stored = pickle.dumps(content, protocol)
    if protocol < 4:  # as old NumPy spelt it; later protocols state the length of a name
        stored = stored.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    loaded = load_plain(stored)
    np.testing.assert_array_equal(loaded.pop(b"data"), content.pop(b"data"), strict=True)
    assert loaded == content


@pytest.mark.parametrize(
    "content",
    [b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n(S'x'\ntR.", b"c_codecs\nencode\n(Vx\nVrot13\ntR.", b"", b"junk"],
)
def test_other_names_and_junk_are_refused(content):
    with pytest.raises(pickle.UnpicklingError):
        load_plain(content)


def load(name, folder):
    """And read what is read when it is wanted only."""
    if name in CORPORA:
        return load_corpus(name, folder)
    return load_images(name, folder, "train") if name in IMAGE_SETS else load_segmentation(name, folder, "train")[0]


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
        ("ade20k", "ADEChallengeData2016/images/training/000.jpg"),
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
    for harm in (half, b"", b"\x80\2cos\nmkdir\n(V%s\ntR." % bytes(made)):  # unpickled, this makes a folder
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
        (lambda name, folder, split: load_corpus(name, folder), "text8", "wikitext-103, wikitext-2"),
    ],
)
def test_unknown_names_list_the_known_ones_and_images_of_another_type_are_refused(loader, name, words, tmp_path):
    with refused(words, name):
        loader(name, tmp_path, "train")
    with refused("train, val, all"):
        load_images("digits", None, "validation")
    with pytest.raises(ShapeError, match=r"\(2, 1, 3, 3\)"):
        Images("x", torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long), ("a",), (0.0,), (1.0,))


def test_the_held_out_slice_is_every_tenth_of_each_class():
    for of_class in BY_CLASS:
        assert of_class[9::10].tolist() == of_class[held_out(LABELS)[of_class]].tolist()


def test_fractions_are_balanced_nested_and_chosen_by_the_seed():
    inner: set[int] = set()
    for share in (0.1, 0.5, 1.0):
        indices = fraction(LABELS, share, 3)
        assert indices.tolist() == sorted(indices.tolist())
        assert inner <= (inner := set(indices.tolist()))
        for label, of_class in enumerate(BY_CLASS):
            size = -(-len(of_class) * round(10 * share) // 10)
            assert len({*of_class.tolist()} & inner) == int((LABELS[indices] == label).sum()) == size
    # 0.1 as a binary number is a little over a tenth: its ceiling would be one too many.
    many = torch.zeros(500, dtype=torch.long)
    parts = [fraction(many, 0.1, seed).tolist() for seed in (0, 0, 1)]
    assert [len(part) for part in parts] == [50] * 3
    assert parts[0] == parts[1] != parts[2]
    for impossible in (0.0, -0.5, 1.5):
        with pytest.raises(AcutanceError, match=r"\(0, 1\]"):
            fraction(LABELS, impossible, 0)


def test_seeds_are_a_function_of_all_the_numbers_and_their_order():
    numbers = [part for length in range(4) for part in itertools.product((-1, 0, 1, 2**40), repeat=length)]
    seeds = {mixed_seed(*part) for part in numbers}
    assert len(seeds) == len(numbers)
    assert all(0 <= seed < 2**63 for seed in seeds)
    first, same, other = (torch.rand(5, generator=generator("cpu", 7, step)) for step in (100, 100, 101))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", CORPORA)
def test_words_are_counted_as_the_public_code_counts(tmp_path, name):
    write_wikitext2(tmp_path).rename(tmp_path / name)
    corpus = load_corpus(name, tmp_path)
    # By frequency in train, ties as they appear; what only valid has comes last.
    assert corpus.vocabulary == ("<eos>", "a", "=", "b", "A", "title", "<unk>", "new")
    texts = [" ".join(corpus.vocabulary[i] for i in part) for part in (corpus.train, corpus.valid, corpus.test)]
    train = "<eos> = A title = <eos> <eos> a b a <unk> b a <eos>"
    assert texts == [train, "a b <eos> new <eos>", "b <eos>"]
