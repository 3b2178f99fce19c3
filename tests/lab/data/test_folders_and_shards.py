"""Labels are the same in every split, and shards are indexed once, but anew when they change."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from tiny_data_sets import write_imagenet, write_shards

from acutance.errors import AcutanceError
from acutance.lab.data import shard_index, shards
from acutance.lab.data.folder import ImageFolder
from acutance.lab.data.shards import WebShards, expand


def remove(val: Path) -> None:
    shutil.rmtree(val / "n00000000")


def add(val: Path) -> None:
    shutil.copytree(val / "n00000000", val / "m")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ([remove], r"n00000000 is missing\)"),
        ([add], r"train/: m is not in train/\)"),
        ([remove, lambda val: (val / "n00000002").rename(val / "z")], r"and 1 more are missing, z is not in train/\)"),
    ],
)
def test_val_has_the_classes_of_train_or_is_refused(harm, words, tmp_path):
    """One folder more or less moves all labels after it."""
    write_imagenet(tmp_path)
    for change in harm:
        change(tmp_path / "val")
    with pytest.raises(AcutanceError, match=words) as caught:
        ImageFolder(tmp_path, "test")
    assert str(tmp_path / "val") in str(caught.value)
    ImageFolder(tmp_path, "all")


@pytest.mark.parametrize("split", ["all", "test"])
def test_hidden_folders_and_files_do_not_count(split, tmp_path):
    write_imagenet(tmp_path)
    plain = ImageFolder(tmp_path, split)
    for part in ("train", "val"):
        shutil.copytree(tmp_path / part / "n00000000", tmp_path / part / ".cache")
        (tmp_path / part / "n00000001" / "._image_0.JPEG").write_bytes(b"no image")
    again = ImageFolder(tmp_path, split)
    assert again.classes == plain.classes
    assert again.paths == plain.paths
    assert again.labels.equal(plain.labels)


def test_without_training_folders_there_is_nothing_to_compare_with(tmp_path):
    write_imagenet(tmp_path)
    shutil.rmtree(tmp_path / "train")
    assert len(ImageFolder(tmp_path, "test").classes) == 3


def test_labels_beyond_the_classes_are_refused(tmp_path):
    pattern = write_shards(tmp_path)  # labels 0, 1, 2
    assert len(WebShards(pattern, classes=5).classes) == 5
    with pytest.raises(AcutanceError, match="labels from 0 to 2 for 2 classes, which are numbered 0 to 1"):
        WebShards(pattern, classes=2)


def test_labels_that_count_from_1_are_explained(tmp_path):
    pattern = write_shards(tmp_path, shards=2)
    for path in list(expand(pattern)):
        _rewrite(path, plus=1)
    words = r"labels from 1 to 3 for 3 classes.*count from 1: take 1 from each"
    with pytest.raises(AcutanceError, match=words) as caught:
        WebShards(pattern, classes=3)
    assert "\n" not in str(caught.value)


def _rewrite(path: Path, plus: int) -> None:
    """The same shard with other labels, of the same length and with the same members in the same places."""
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        places = [(m.offset_data, m.size) for m in archive if m.name.endswith(".cls")]
    for offset, size in places:
        label = str(int(content[offset : offset + size]) + plus).encode()
        content = content[:offset] + label + content[offset + size :]
    path.write_bytes(content)


@pytest.fixture
def parsed(monkeypatch):
    """The tar files whose headers are read."""
    names: list[str] = []
    real = shard_index._read_headers
    monkeypatch.setattr(shard_index, "_read_headers", lambda path: names.append(path.name) or real(path))
    return names


def test_headers_are_read_once(tmp_path, parsed):
    pattern = write_shards(tmp_path)
    first = WebShards(pattern, "train", every=3)
    assert sorted(parsed) == [f"part-{i:06d}.tar" for i in range(4)]
    again = WebShards(pattern, "train", every=3)
    assert len(parsed) == 4
    assert again.labels.equal(first.labels)
    assert again.order(0, 0).equal(first.order(0, 0))
    assert all(again.read(i).tobytes() == first.read(i).tobytes() for i in range(len(first)))
    every = str(tmp_path / "*")
    assert len(WebShards(every)) == 20  # the indices are no shards


def test_a_shard_that_changed_is_read_anew(tmp_path, parsed):
    pattern = write_shards(tmp_path)
    before = WebShards(pattern)
    path = tmp_path / "part-000002.tar"
    status = path.stat()
    _rewrite(path, plus=3)
    assert path.stat().st_size == status.st_size  # the time alone tells
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = WebShards(pattern)
    assert parsed[4:] == ["part-000002.tar"]
    assert (after.labels - before.labels).view(4, 5).tolist() == [[0] * 5, [0] * 5, [3] * 5, [0] * 5]
    with tarfile.open(path, "w"):
        pass  # empty now: the index must not hide it
    with pytest.raises(AcutanceError, match="no images in it"):
        WebShards(pattern)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "acutance-shard/0"}'])
def test_a_damaged_index_is_made_anew(content, tmp_path, parsed):
    pattern = write_shards(tmp_path, shards=1)
    before = WebShards(pattern)
    index = tmp_path / ".part-000000.tar.index.json"
    whole = json.loads(index.read_bytes())
    index.write_bytes(content)
    assert WebShards(pattern).labels.equal(before.labels)
    assert len(parsed) == 2
    assert json.loads(index.read_bytes()) == whole
    short = {**whole, "index": {**whole["index"], "labels": whole["index"]["labels"][1:]}}
    index.write_text(json.dumps(short))
    assert WebShards(pattern).labels.equal(before.labels)


def test_where_nothing_can_be_written_headers_are_read_each_time(tmp_path, parsed, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(shard_index, "atomic_write", refuse)
    pattern = write_shards(tmp_path, shards=2)
    assert WebShards(pattern).labels.equal(WebShards(pattern).labels)
    assert len(parsed) == 4


def test_processes_begin_at_different_shards(tmp_path, parsed, monkeypatch):
    monkeypatch.setattr(shards, "READERS", 1)
    pattern = write_shards(tmp_path)
    monkeypatch.setattr(shards.processes, "place", lambda: (1, 2))
    second = WebShards(pattern)
    assert parsed == [f"part-{i:06d}.tar" for i in (2, 3, 0, 1)]
    monkeypatch.setattr(shards.processes, "place", lambda: (0, 2))
    first = WebShards(pattern)
    assert len(parsed) == 4
    assert first.read(7).tobytes() == second.read(7).tobytes()


def test_a_damaged_member_is_named(tmp_path):
    found = WebShards(write_shards(tmp_path, shards=1))
    path = tmp_path / "part-000000.tar"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x89PNG", b"junk"))
    with pytest.raises(AcutanceError, match=r"part-000000\.tar:s0_3 is damaged"):
        found.read(3)
