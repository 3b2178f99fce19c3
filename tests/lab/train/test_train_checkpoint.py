"""A checkpoint is whole or it is not there; what is damaged or hostile is never used."""

import errno
import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.train import checkpoint
from acutance.lab.train.checkpoint import DamagedError, Store, read_folder, write_folder

TENSORS = {"model.safetensors": {"w": torch.arange(64.0), "b": torch.ones(3, dtype=torch.bfloat16)}}
NOTES = {"best": None, "scores": {"top1": 50.0}}


def stored(folder, keep=2, steps=(1, 2)):
    store = Store(folder, keep)
    for step in steps:
        store.write(step, {"model.safetensors": {"w": torch.full((8,), float(step))}}, {"step": step})
    return store


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    write_folder(tmp_path / "step-000000007", TENSORS, NOTES)
    found = read_folder(tmp_path / "step-000000007")
    assert found.step == 7
    assert found.notes == NOTES
    for name, value in TENSORS["model.safetensors"].items():
        assert torch.equal(found.tensors["model.safetensors"][name], value)


def test_only_the_newest_are_kept(tmp_path):
    store = stored(tmp_path, keep=2, steps=(1, 5, 10, 1000))
    assert [path.name for path in store.paths()] == ["step-000001000", "step-000000010"]


def truncated(body):
    return body[: len(body) // 2]


def one_bit_flipped(body):
    return body[:-1] + bytes([body[-1] ^ 1])


def emptied(body):
    return b""


@pytest.mark.parametrize("harm", [truncated, one_bit_flipped, emptied])
@pytest.mark.parametrize("file", ["model.safetensors", "checkpoint.json"])
def test_harm_is_noticed_and_the_one_before_is_used(tmp_path, harm, file):
    store = stored(tmp_path)
    path = store.newest() / file
    path.write_bytes(harm(path.read_bytes()))
    found, complaints = store.newest_good()
    assert found.step == 1
    assert torch.equal(found.tensors["model.safetensors"]["w"], torch.ones(8))
    assert len(complaints) == 1
    assert "damaged-step-000000002" in complaints[0]
    store.write(2, {"model.safetensors": {"w": torch.zeros(8)}}, {})  # the damaged one is not in the way
    assert store.newest_good()[0].step == 2


def test_a_missing_file_is_noticed(tmp_path):
    store = stored(tmp_path)
    (store.newest() / "model.safetensors").unlink()
    with pytest.raises(DamagedError):
        read_folder(store.newest())


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_a_malicious_pickle_is_refused_even_if_its_checksum_was_forged(tmp_path):
    marker = tmp_path / "it ran"
    store = stored(tmp_path / "checkpoints")
    folder = store.newest()
    body = pickle.dumps(Evil(marker))
    (folder / "model.safetensors").write_bytes(body)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"]["model.safetensors"] = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="not a safetensors file"):
        read_folder(folder)
    assert store.newest_good()[0].step == 1
    assert not marker.exists()
    pickle.loads(body)  # what reading it in the usual way would have done
    assert marker.exists()


def another_version(folder, monkeypatch):
    manifest = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**manifest, "format": "acutance-checkpoint/2"}))


def forbidden(folder, monkeypatch):
    real = Path.read_bytes

    def refusing(path):
        if folder in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)


@pytest.mark.parametrize(
    ("change", "message"),
    [(another_version, "go on with the version that wrote it"), (forbidden, "may not be read by this user")],
)
def test_what_is_whole_but_cannot_be_read_here_is_not_put_aside(tmp_path, monkeypatch, change, message):
    store = stored(tmp_path)
    change(store.newest(), monkeypatch)
    with pytest.raises(AcutanceError, match=message):
        store.newest_good()
    monkeypatch.undo()
    assert [path.name for path in store.paths()] == ["step-000000002", "step-000000001"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "evil.pkl"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    folder = stored(tmp_path).newest()
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"] = {name: {"sha256": "", "bytes": 0}}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="no name of a tensor file"):
        read_folder(folder)


@pytest.mark.parametrize("moment", ["first file", "manifest", "rename"])
@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_ctrl_c_leaves_the_last_one_and_nothing_half_written(tmp_path, monkeypatch, moment, kind):
    store = stored(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    real = checkpoint._write_through

    def fails(path, body):
        if moment == "first file" or (moment == "manifest" and path.suffix == ".json"):
            path.write_bytes(body[: len(body) // 2])  # what fitted
            raise kind
        real(path, body)

    def no_rename(self, target):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_through", fails)
        if moment == "rename":
            patch.setattr(Path, "rename", no_rename)
        with pytest.raises(type(kind)):
            store.write(3, TENSORS, NOTES)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert store.newest_good()[0].step == 2


def test_a_real_limit_on_file_size_is_survived(tmp_path):
    """The operating system itself refuses to write on, in the middle of a file."""
    resource = pytest.importorskip("resource")
    import signal

    store = stored(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[0][1]))
        with pytest.raises(OSError, match="File too large"):
            store.write(3, {"model.safetensors": {"w": torch.zeros(4096)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000001", "step-000000002"]
    assert store.newest_good()[0].step == 2


def test_a_disk_that_lies_about_writing_is_found_out_and_older_ones_stay(tmp_path, monkeypatch):
    store = stored(tmp_path)
    real = checkpoint._write_through

    def lies(path, body):
        real(path, body[:-1] + b"\xff" if path.suffix == ".safetensors" else body)

    monkeypatch.setattr(checkpoint, "_write_through", lies)
    with pytest.raises(OSError, match="reads back wrong"):
        store.write(3, TENSORS, NOTES)
    assert [path.name for path in store.paths()] == ["step-000000002", "step-000000001"]


def test_files_are_flushed_before_they_get_their_name(tmp_path, monkeypatch):
    events = []
    flush, rename = os.fsync, Path.rename

    def noted_rename(self, target):
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("flush"), flush(handle)))
    monkeypatch.setattr(Path, "rename", noted_rename)
    write_folder(tmp_path / "step-000000001", TENSORS, NOTES)
    assert events == ["flush", "flush", "flush", "rename", "flush"]  # tensors, manifest, folder; then its parent


def test_nothing_in_training_unpickles():
    for file in Path(checkpoint.__file__).parent.glob("*.py"):
        source = file.read_text()
        assert "torch.load(" not in source, file
        assert "import pickle" not in source, file
