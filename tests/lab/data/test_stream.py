"""Folders and shards of images, and the batches made of them."""

import json
import os
import shutil
import tarfile
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data_sets import add_member, picture, refused, write_shards

import standins
from acutance.io import inputs
from acutance.lab.data import imagenet
from acutance.lab.data.imagenet import Crops, ImageFolder, WebShards, centre_crop, expand
from acutance.lab.data.stream import evaluation_batches, repeated, training_batches

SEED = 5
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture(scope="module", params=["folder", "shards"])
def images(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "folder":
        return ImageFolder(standins.imagenet(root) / "val", None)
    return WebShards(write_shards(root))


@pytest.fixture
def parsed(monkeypatch):
    """The tar files whose headers are read."""
    names: list[str] = []
    real = imagenet._read_headers
    monkeypatch.setattr(imagenet, "_read_headers", lambda path: names.append(path.name) or real(path))
    return names


def batches(images, count, **options):
    stream = training_batches(
        Crops(images, 16), lambda epoch: images.order(SEED, epoch), batch_size=8, seed=SEED, **options
    )
    return [next(stream) for _ in range(count)]


def test_a_batch_is_a_function_of_seed_and_step_alone_and_processes_get_rows_of_it(images):
    whole = batches(images, 5)
    assert_same(whole[3:], batches(images, 2, first_step=3))  # step 3 is in another epoch
    assert_same(whole[:3], batches(images, 3, workers=2))
    for rows in (slice(0, 4), slice(4, 8)):
        assert_same([(x[rows], y[rows]) for x, y in whole[:2]], batches(images, 2, rows=rows))


def test_an_epoch_visits_everything_and_a_sample_differs_from_epoch_to_epoch(images):
    with refused("fewer than a batch of 99"):
        next(training_batches(Crops(images), lambda epoch: images.order(0, epoch), batch_size=99, seed=0))
    for epoch in range(2):
        assert images.order(SEED, epoch).sort().values.tolist() == list(range(len(images)))
    assert images.order(SEED, 0).tolist() != images.order(SEED, 1).tolist()
    stream = training_batches(Crops(images, 16), lambda epoch: torch.arange(8), batch_size=8, seed=SEED)
    first, second = (next(stream)[0] for _ in range(2))  # the same samples in two epochs
    assert not any(map(torch.equal, first, second))


def test_evaluation_sees_everything_in_order_once(images):
    found = list(evaluation_batches(Crops(images, 16), batch_size=7))
    assert torch.equal(torch.cat([labels for _, labels in found]), images.labels)
    first = np.asarray(centre_crop(images.read(0), 16)).transpose(2, 0, 1)
    assert np.array_equal(found[0][0][0].numpy(), first)
    some = list(evaluation_batches(Crops(images, 16), batch_size=7, indices=[2, 4]))
    assert torch.equal(some[0][0], found[0][0][[2, 4]])


def test_splits_of_a_folder(tmp_path):
    root = standins.imagenet(tmp_path)
    train, val, both = (ImageFolder(root, split, every=7) for split in ("train", "val", "all"))
    assert [path.name for path in val.paths] == ["006.png", "013.png"] * 3
    assert val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert set(train.paths) | set(val.paths) == set(both.paths)
    assert len(both) == 60
    assert train.classes == ("digit0", "digit1", "digit2")
    test = ImageFolder(root, "test")
    assert ImageFolder(root / "val", None).paths == test.paths
    with refused(r"lower task\.held_out_every"):
        ImageFolder(root, "val")


def test_splits_of_shards_which_are_read_group_by_group(tmp_path):
    pattern = write_shards(tmp_path)
    train, val, both = (WebShards(pattern, split, every=3) for split in ("train", "val", "all"))
    assert len(train) + len(val) == len(both) == 20
    assert val.labels.tolist() == [both.labels[i] for i in range(20) if (i // 3) % 3 == 2]
    assert np.array_equal(np.asarray(both.read(7)), np.asarray(picture(40, 30, 7)))
    assert both.labels[7] == 7 % 3
    assert len(WebShards(str(tmp_path / "*"))) == 20  # hidden indices are no shards
    some = expand(f"{tmp_path}/part-{{000001..000002}}.tar")
    assert [path.name for path in some] == ["part-000001.tar", "part-000002.tar"]
    with refused(r"looked for .*part-000004\.tar.*expected .*webdataset"):
        list(expand(f"{tmp_path}/part-{{000003..000004}}.tar"))
    shards = WebShards(write_shards(tmp_path / "many", shards=2 * imagenet.SHARDS_AT_ONCE, per_shard=2))
    first, second = (shards.order(0, 0) // 2).view(2, -1).tolist()  # which shard each image of each half is in
    assert len(set(first)) == len(set(second)) == imagenet.SHARDS_AT_ONCE
    assert not set(first) & set(second)


def test_repetitions_share_a_batch_but_no_pair():
    order = torch.randperm(48)
    for number, batch in enumerate(repeated(order, 12).view(4, 12)):
        assert sorted(batch.tolist()) == sorted(order[number * 4 : number * 4 + 4].tolist() * 3)
        assert (batch[::2] != batch[1::2]).all()
    odd = repeated(torch.arange(100), 16).view(-1, 16)  # 16 is no multiple of 3
    assert len(odd) == 6
    assert (odd[:, ::2] != odd[:, 1::2]).all()
    assert odd.flatten().bincount().max() == 3


def test_random_parts_lie_inside_with_the_stated_areas_and_shapes():
    parts = np.array([imagenet.random_part(100, 80, np.random.default_rng(seed)) for seed in range(500)])
    left, top, width, height = parts.T
    assert 0 <= parts.min() <= (top + height).max() <= 80
    assert (left + width).max() <= 100
    area, aspect = width * height / 8000, width / height
    assert 0.07 < area.min() < 0.8 < area.max()
    assert 0.72 < aspect.min() < aspect.max() < 1.39
    assert imagenet.random_part(1000, 2, np.random.default_rng(0)) == (498, 0, 3, 2)  # nothing fits: the middle


def test_crops_are_pillows_in_training_and_in_measuring():
    image = picture(60, 40, 0)
    left, top, width, height = imagenet.random_part(60, 40, np.random.default_rng(3))
    part = image.crop((left, top, left + width, top + height)).resize((16, 16), Image.Resampling.BICUBIC)
    found = imagenet.random_resized_crop(image, 16, np.random.default_rng(3))
    assert np.array_equal(np.asarray(found), np.asarray(part))
    assert centre_crop(image, 14).size == (14, 14)
    scaled = np.asarray(image.resize((384, 256), Image.Resampling.BICUBIC).crop((80, 16, 304, 240)))
    assert np.array_equal(np.asarray(centre_crop(image, 224)), scaled)
    measured = inputs.centre_crop((224, 224), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), fraction=224 / 256)([image])
    assert np.array_equal(scaled.transpose(2, 0, 1), (255 * measured[0]).round().numpy())


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("test", "val")])
def test_missing_folders_say_where_what_and_how(split, part, tmp_path):
    for folder in (tmp_path, tmp_path / part / "n1"):  # of all, or of images
        folder.mkdir(parents=True, exist_ok=True)
        with refused(r"looked for .*; expected .*https://image-net.org", tmp_path):
            ImageFolder(tmp_path, split)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_one_clear_line_also_from_a_worker(workers, tmp_path):
    folder = ImageFolder(standins.imagenet(tmp_path), "all")
    path = folder.paths[4]
    path.write_bytes(path.read_bytes()[:60])
    with refused("is damaged", path):
        list(evaluation_batches(Crops(folder), batch_size=4, workers=workers))
    shards = WebShards(write_shards(tmp_path / "shards", shards=1))
    tar = shards.paths[0]
    tar.write_bytes(tar.read_bytes().replace(b"\x89PNG", b"junk"))
    with refused(r"part-000000\.tar:s0_3 is damaged"):
        shards.read(3)


def test_val_has_the_classes_of_train_or_is_refused_and_what_is_hidden_does_not_count(tmp_path):
    """One folder more or less moves all labels after it."""
    root = standins.imagenet(tmp_path)
    val, plain = root / "val", ImageFolder(root, "test")
    shutil.copytree(val / "digit1", val / ".cache")
    (val / "digit1" / "._000.png").write_bytes(b"no image")
    hidden = ImageFolder(root, "test")
    assert (hidden.classes, hidden.paths) == (plain.classes, plain.paths)
    shutil.copytree(val / "digit1", val / "m")
    for removed, words in ((None, "m is not in train/"), (0, "0 is missing"), (2, "digit0 and 1 more are missing")):
        if removed is not None:
            shutil.rmtree(val / f"digit{removed}")
        with refused(words, val):
            ImageFolder(root, "test")
    shutil.rmtree(root / "train")
    assert ImageFolder(root, "test").classes == ("digit1", "m")  # nothing to compare with


def rewrite(path, plus):
    """The same shard with other labels, of the same length and with the same members in the same places."""
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.endswith(".cls"):
                content[member.offset_data] += plus
    path.write_bytes(content)


def test_labels_beyond_the_classes_are_refused(tmp_path):
    pattern = write_shards(tmp_path, shards=2)  # labels 0, 1, 2
    assert len(WebShards(pattern, classes=5).classes) == 5
    with refused("labels from 0 to 2 for 2 classes, which are numbered 0 to 1"):
        WebShards(pattern, classes=2)
    for path in list(expand(pattern)):
        rewrite(path, plus=1)
        os.utime(path, ns=(0, 0))
    with refused(r"labels from 1 to 3 for 3 classes.*count from 1"):
        WebShards(pattern, classes=3)


def test_headers_are_read_once_and_anew_when_a_shard_changed_or_none_can_be_kept(tmp_path, parsed, monkeypatch):
    pattern = write_shards(tmp_path)
    first = WebShards(pattern)
    assert sorted(parsed) == [f"part-{i:06d}.tar" for i in range(4)]
    again = WebShards(pattern)
    assert len(parsed) == 4
    assert again.labels.equal(first.labels)
    assert all(again.read(i).tobytes() == first.read(i).tobytes() for i in range(20))
    path = tmp_path / "part-000002.tar"
    status = path.stat()
    rewrite(path, plus=3)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = WebShards(pattern)
    assert parsed[4:] == ["part-000002.tar"]
    assert (after.labels - first.labels).view(4, 5).tolist() == [[0] * 5, [0] * 5, [3] * 5, [0] * 5]
    monkeypatch.setattr(imagenet, "atomic_write", Mock(side_effect=PermissionError("read-only")))
    pattern = write_shards(tmp_path / "read-only", shards=2)
    assert WebShards(pattern).labels.equal(WebShards(pattern).labels)
    assert len(parsed) == 9  # both, each time


@pytest.mark.parametrize("harm", ["", "{", "[]", '{"format": "acutance-shard/0"}', "short"])
def test_a_damaged_index_is_made_anew(harm, tmp_path, parsed):
    pattern = write_shards(tmp_path, shards=1)
    before = WebShards(pattern)
    index = tmp_path / ".part-000000.tar.index.json"
    whole = json.loads(index.read_bytes())
    short = {**whole, "index": [entry[1:] for entry in whole["index"]]}
    index.write_text(json.dumps(short) if harm == "short" else harm)
    assert WebShards(pattern).labels.equal(before.labels)
    assert len(parsed) == 2
    assert json.loads(index.read_bytes()) == whole


def one_member(*labels, links=()):
    def write(path):
        with tarfile.open(path, "w") as archive:
            for name, content in (("a.png", b"an image"), *(("a.cls", label) for label in labels)):
                add_member(archive, name, content)
            for name, kind, to in links:
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, to
                archive.addfile(info)

    return write


def nested_headers(path):
    """A name's header that is preceded by the header of a longer name, again and again."""
    info = tarfile.TarInfo("x")
    info.type = tarfile.GNUTYPE_LONGNAME
    path.write_bytes(info.tobuf() * 5000)


@pytest.mark.parametrize(
    "harm",
    [
        one_member(),
        one_member(b"cat"),
        one_member(b"-1"),
        one_member(b"9" * 12),  # a list of all classes would fill the memory
        one_member(b" " * 2000 + b"1"),
        one_member(links=[("a.cls", tarfile.SYMTYPE, "/etc/passwd")]),
        one_member(links=[("a.cls", tarfile.SYMTYPE, "b.cls"), ("b.cls", tarfile.SYMTYPE, "a.cls")]),
        one_member(b"1", links=[("b.png", tarfile.LNKTYPE, "a.png"), ("b.cls", tarfile.LNKTYPE, "a.cls")]),
        nested_headers,
        lambda path: path.write_bytes(path.read_bytes()[:1500]),
        lambda path: path.write_bytes(b"junk" * 300),
        lambda path: tarfile.open(path, "w").close(),
    ],
)
def test_damaged_shards_are_named(harm, tmp_path):
    pattern = write_shards(tmp_path)
    path = tmp_path / "part-000002.tar"
    WebShards(pattern)  # the index must not hide what follows
    harm(path)
    with refused("is damaged", path):
        WebShards(pattern)


def test_links_that_lead_nowhere_are_no_missing_classes(tmp_path):
    """A class less would move the labels of all that follow it."""
    root = standins.imagenet(tmp_path)
    link = root / "train" / "a"
    link.symlink_to(root / "train" / "digit1")
    assert ImageFolder(root, "all").classes == ("a", "digit0", "digit1", "digit2")
    link.unlink()
    for target in (link, tmp_path / "gone"):
        link.symlink_to(target)
        with refused("is damaged .it is a broken link", link):
            ImageFolder(root, "all")
        link.unlink()
    pattern = write_shards(tmp_path / "shards")
    shard = tmp_path / "shards" / "part-000002.tar"
    shard.unlink()
    shard.symlink_to(shard)
    for named in (pattern, str(tmp_path / "shards" / "*.tar")):
        with refused("part-000002.tar"):
            WebShards(named)
