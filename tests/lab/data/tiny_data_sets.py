"""Tiny data sets in the layouts of the real ones."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_cifar10(root: Path, *, per_file: int = 20, protocol: int = 2) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(CIFAR10_FILES):
        content = {b"data": random_bytes(per_file, 3072, seed=seed), b"labels": [i % 10 for i in range(per_file)]}
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    return folder


def write_cifar100(root: Path, *, per_class: int = 20) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir()
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"apple", b"bear"]}, 2))
    labels = [i % 2 for i in range(2 * per_class)]
    for seed, name in enumerate(("train", "test")):
        content = {b"data": random_bytes(len(labels), 3072, seed=seed), b"fine_labels": labels}
        (folder / name).write_bytes(pickle.dumps(content, 2))
    return folder


def write_fashion_mnist(root: Path, *, compressed: bool = True, count: int = 100) -> Path:
    folder = root / "fashion-mnist"
    folder.mkdir()
    for seed, part in enumerate(("train", "t10k")):
        pixels, labels = random_bytes(count, 28, 28, seed=seed), np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
            name = f"{part}-{kind}-ubyte"
            (folder / (name + ".gz" if compressed else name)).write_bytes(
                gzip.compress(content) if compressed else content
            )
    return folder


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(random_bytes(height, width, 3, seed=seed))


def write_imagenet(root: Path, *, classes: int = 3, per_class: int = 6) -> Path:
    for part in ("train", "val"):
        for kind in range(classes):
            folder = root / part / f"n{kind:08d}"
            folder.mkdir(parents=True)
            for i in range(per_class):
                seed = 100 * kind + i + (10_000 if part == "val" else 0)
                picture(40 + 3 * i, 50 - 2 * i, seed).save(folder / f"image_{i}.JPEG", "JPEG")
    return root


def write_shards(root: Path, *, shards: int = 4, per_shard: int = 5) -> str:
    root.mkdir(exist_ok=True)
    for shard in range(shards):
        with tarfile.open(root / f"part-{shard:06d}.tar", "w") as archive:
            for i in range(per_shard):
                image = io.BytesIO()
                picture(40, 30, shard * per_shard + i).save(image, "PNG")
                label = str((shard * per_shard + i) % 3).encode()
                for suffix, content in (("cls", label), ("png", image.getvalue())):
                    add_member(archive, f"s{shard}_{i}.{suffix}", content)
    return str(root / f"part-{{000000..{shards - 1:06d}}}.tar")


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_camvid(root: Path, *, count: int = 4) -> Path:
    folder = root / "CamVid"
    for seed, part in enumerate(("train", "val", "test")):
        (folder / part).mkdir(parents=True)
        (folder / f"{part}annot").mkdir()
        for i in range(count):
            picture(24, 18, 10 * seed + i).save(folder / part / f"frame_{i}.png")
            label = random_bytes(18, 24, seed=10 * seed + i) % 12
            Image.fromarray(label).save(folder / f"{part}annot" / f"frame_{i}.png")
    return folder


def write_ade20k(root: Path, *, count: int = 40, names: bool = True) -> Path:
    folder = root / "ADEChallengeData2016"
    for part in ("training", "validation"):
        (folder / "images" / part).mkdir(parents=True)
        (folder / "annotations" / part).mkdir(parents=True)
        for i in range(count):
            name = f"ADE_{part[:5]}_{i:08d}"
            picture(20 + i % 3, 16, i).save(folder / "images" / part / f"{name}.jpg", "JPEG")
            label = random_bytes(16, 20 + i % 3, seed=i) % 151
            Image.fromarray(label).save(folder / "annotations" / part / f"{name}.png")
    if names:
        rows = [f"{i}\t0.1\t10\t1\t0\tthing {i}, object {i}" for i in range(1, 151)]
        (folder / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
    return folder


def write_wikitext2(root: Path) -> Path:
    folder = root / "wikitext-2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(" \n = A title = \n \n a b a <unk> \u2028 b\r a \n", encoding="utf-8")
    (folder / "wiki.valid.tokens").write_text(" a b \n new \n", encoding="utf-8")
    (folder / "wiki.test.tokens").write_text(" b \n", encoding="utf-8")
    return folder


def write_ptb(root: Path) -> Path:
    folder = root / "ptb"
    folder.mkdir()
    for part, text in (("train", " the cat sat \n the N\n"), ("valid", " cat\n"), ("test", " the\n")):
        (folder / f"ptb.{part}.txt").write_text(text)
    return folder
