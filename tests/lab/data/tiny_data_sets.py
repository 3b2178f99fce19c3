import gzip
import io
import pickle
import struct
import tarfile
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

import standins
import tiny_tasks
from acutance.errors import AcutanceError


@contextmanager
def refused(words, place=""):
    """Expect an error of one line that names the place."""
    with pytest.raises(AcutanceError, match=words) as caught:
        yield
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)


def random_bytes(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_cifar10(root):
    files = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    return write_pickles(root / "cifar-10-batches-py", files, {b"labels": [i % 10 for i in range(20)]})


def write_cifar100(root):
    folder = write_pickles(root / "cifar-100-python", ("train", "test"), {b"fine_labels": [0, 1] * 20})
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"apple", b"bear"]}, 2))
    return folder


def write_pickles(folder, files, labels):
    folder.mkdir()
    for seed, name in enumerate(files):
        pixels = random_bytes(len(next(iter(labels.values()))), 3072, seed=seed)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, **labels}, 2))
    return folder


def write_fashion_mnist(root, *, compressed=True):
    folder = root / "fashion-mnist"
    folder.mkdir()
    for seed, part in enumerate(("train", "t10k")):
        pixels, labels = random_bytes(100, 28, 28, seed=seed), np.arange(100, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
            path = folder / f"{part}-{kind}-ubyte{'.gz' if compressed else ''}"
            path.write_bytes(gzip.compress(content) if compressed else content)
    return folder


def picture(width, height, seed):
    return Image.fromarray(random_bytes(height, width, 3, seed=seed))


def write_shards(root, *, shards=4, per_shard=5):
    root.mkdir(exist_ok=True)
    for shard in range(shards):
        with tarfile.open(root / f"part-{shard:06d}.tar", "w") as archive:
            for i in range(shard * per_shard, (shard + 1) * per_shard):
                image = io.BytesIO()
                picture(40, 30, i).save(image, "PNG")
                add_member(archive, f"s{shard}_{i % per_shard}.cls", str(i % 3).encode())
                add_member(archive, f"s{shard}_{i % per_shard}.png", image.getvalue())
    return str(root / f"part-{{000000..{shards - 1:06d}}}.tar")


def add_member(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_camvid(root):
    tiny_tasks.segmentation(root)
    return root / "CamVid"


def write_wikitext2(root):
    folder = root / "wikitext-2"
    folder.mkdir()
    train = " \n = A title = \n \n a b a <unk> \u2028 b\r a \n"
    for part, text in {"train": train, "valid": " a b \n new \n", "test": " b \n"}.items():
        (folder / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")
    return folder


WRITERS = {
    "cifar10": write_cifar10, "cifar100": write_cifar100, "fashion_mnist": write_fashion_mnist,
    "camvid": write_camvid, "ade20k": standins.ade20k, "wikitext-2": write_wikitext2,
}  # fmt: skip
