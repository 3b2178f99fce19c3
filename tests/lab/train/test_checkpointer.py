"""A checkpoint is whole or it is not there; what is damaged or hostile is never used."""

import errno
import hashlib
import json
import os
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.train import checkpointer
from acutance.lab.train.checkpointer import DamagedError, newest_whole, read_checkpoint, write_checkpoint
from acutance.lab.train.checkpointer import checkpoint_paths as paths

TENSORS = {"model.safetensors": {"w": torch.arange(64.0), "b": torch.ones(3, dtype=torch.bfloat16)}}
NOTES = {"step": 1000, "best": None, "scores": {"top1": 50.0}}


def write(folder, *steps, keep=2):
    for step in steps:
        write_checkpoint(folder, {"model.safetensors": {"w": torch.full((8,), float(step))}}, {"step": step}, keep)


def names(folder):
    return [path.name for path in paths(folder)]


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 1 and 2, of which tests harm the second."""
    write(tmp_path / "two", 1, 2)
    return tmp_path / "two"


def change_manifest(folder, **changes):
    path = paths(folder)[0] / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_only_the_newest_are_kept_bit_for_bit(tmp_path):
    write(tmp_path, 1, 5, 10)
    write_checkpoint(tmp_path, TENSORS, NOTES, 2)
    assert names(tmp_path) == ["step-000001000", "step-000000010"]
    tensors, notes = read_checkpoint(tmp_path / "step-000001000")
    assert notes == NOTES
    torch.testing.assert_close(tensors, TENSORS, rtol=0, atol=0)


@pytest.mark.parametrize(
    "harm",
    [lambda body: body[: len(body) // 2], lambda body: body[:-1] + bytes([body[-1] ^ 1]), lambda body: b"", None],
    ids=["truncated", "one bit flipped", "emptied", "gone"],
)
@pytest.mark.parametrize("file", ["model.safetensors", "checkpoint.json"])
def test_harm_is_noticed_and_the_one_before_is_used(two, harm, file):
    path = paths(two)[0] / file
    body = path.read_bytes()
    path.unlink() if harm is None else path.write_bytes(harm(body))
    found, complaints = newest_whole(two)
    assert found.name == "step-000000001"
    assert len(complaints) == 1
    assert "damaged-step-000000002" in complaints[0]
    write(two, 2)  # the damaged one is not in the way
    assert newest_whole(two)[0].name == "step-000000002"


def test_a_malicious_pickle_is_refused_even_if_its_checksum_was_forged(two, tmp_path):
    marker = tmp_path / "it ran"
    body = f"cos\nmkdir\n(V{marker}\ntR.".encode()
    (paths(two)[0] / "model.safetensors").write_bytes(body)
    change_manifest(two, files={"model.safetensors": {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}})
    with pytest.raises(DamagedError, match="not a safetensors file"):
        read_checkpoint(paths(two)[0])
    assert newest_whole(two)[0].name == "step-000000001"
    assert not marker.exists()
    pickle.loads(body)  # what reading it in the usual way would have done
    assert marker.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "evil.pkl"])
def test_a_manifest_cannot_name_files_elsewhere(two, name):
    change_manifest(two, files={name: {"sha256": "", "bytes": 0}})
    with pytest.raises(DamagedError, match="no name of a tensor file"):
        read_checkpoint(paths(two)[0])


@pytest.mark.parametrize("words", ["the version that wrote it", "may not be read by this user"])
def test_what_another_version_wrote_or_may_not_be_read_here_is_not_put_aside(two, monkeypatch, words):
    if "version" in words:
        change_manifest(two, format="acutance-checkpoint/2")
    else:
        monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(AcutanceError, match=words):
        newest_whole(two)
    assert names(two) == ["step-000000002", "step-000000001"]


@pytest.mark.parametrize("moment", ["first file", "manifest", "rename"])
@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_ctrl_c_leaves_the_last_one_and_nothing_half_written(two, monkeypatch, moment, kind):
    before = {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}
    real = checkpointer.atomic_write

    def fails(path, body):
        if moment == "first file" or (moment == "manifest" and path.suffix == ".json"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(body[: len(body) // 2])  # what fitted
            raise kind
        real(path, body)

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer, "atomic_write", fails)
        if moment == "rename":
            patch.setattr(Path, "rename", Mock(side_effect=kind))
        with pytest.raises(type(kind)):
            write(two, 3)
    assert {path: path.read_bytes() for path in two.rglob("*") if path.is_file()} == before
    assert newest_whole(two)[0].name == "step-000000002"


def test_a_disk_that_lies_about_writing_is_found_out_and_older_ones_stay(two, monkeypatch):
    real = checkpointer.atomic_write
    monkeypatch.setattr(checkpointer, "atomic_write", lambda path, body: real(path, body[:-1] + b"\xff"))
    with pytest.raises(OSError, match="reads back wrong"):
        write(two, 3)
    assert names(two) == ["step-000000002", "step-000000001"]


def test_files_are_flushed_before_they_get_their_name(tmp_path, monkeypatch):
    events, flush, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("flush"), flush(handle)))
    monkeypatch.setattr(Path, "rename", lambda *paths: (events.append("rename"), rename(*paths)))
    write(tmp_path, 1)
    assert events == ["flush", "flush", "flush", "rename", "flush"]  # tensors, manifest, folder; then its parent
