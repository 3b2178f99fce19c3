"""Checkpoints: whole or not at all, checked when written and when read, and never unpickled."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from acutance.errors import AcutanceError

FORMAT = "acutance-checkpoint/1"
MANIFEST = "checkpoint.json"
NAME = re.compile(r"step-(\d{9})")

Tensors = Mapping[str, Mapping[str, Tensor]]  # by file, then by name


class DamagedError(AcutanceError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step` steps: tensors by file and name, and notes that JSON can say."""

    path: Path
    step: int
    tensors: Tensors
    notes: Mapping[str, Any]


def write_folder(folder: Path, tensors: Tensors, notes: Mapping[str, Any]) -> Path:
    """Write a checkpoint beside its place, flush it to disk, move it there, and read it back.

    Whatever goes wrong before the last rename (a full disk, Ctrl-C, a crash) leaves nothing at `folder`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    try:
        temporary.mkdir()
        files = {}
        for name, content in tensors.items():
            body = tensor_bytes({key: value.contiguous() for key, value in content.items()})
            files[name] = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
            _write_through(temporary / name, body)
        manifest = {"format": FORMAT, "files": files, "notes": notes}
        _write_through(temporary / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
        _flush_folder(temporary)
        temporary.rename(folder)
        _flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        _checked_manifest(folder)
    except DamagedError as error:  # a disk that says it wrote and did not
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(errno.EIO, f"what was written reads back wrong ({error})", str(folder)) from error
    return folder


def read_folder(folder: Path) -> Checkpoint:
    """Read a checkpoint; raises `DamagedError` if anything in it is missing, cut off, changed or no tensor file."""
    manifest = _checked_manifest(folder)
    try:
        tensors = {name: load_file(folder / name) for name in manifest["files"]}
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"{folder}: not a safetensors file, and nothing else is ever read: {error}") from error
    found = NAME.fullmatch(folder.name)
    return Checkpoint(folder, int(found[1]) if found else -1, tensors, manifest["notes"])


class Store:
    """The checkpoints of a run, newest first; only the newest `keep_last` are kept."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self._keep_last = folder, keep_last

    def write(self, step: int, tensors: Tensors, notes: Mapping[str, Any]) -> Path:
        """Add a checkpoint; older ones go only once the new one has been read back."""
        path = self.folder / f"step-{step:09d}"
        if not path.exists():
            write_folder(path, tensors, notes)
        for old in self.paths()[self._keep_last :]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def paths(self) -> list[Path]:
        """All, newest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if NAME.fullmatch(path.name)), reverse=True)

    def newest(self) -> Path | None:
        """Where the newest one lies, unchecked."""
        return next(iter(self.paths()), None)

    def newest_step(self) -> int | None:
        """After how many steps it was written."""
        newest = self.newest()
        return None if newest is None else int(newest.name.removeprefix("step-"))

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest one that is whole, and what was wrong with newer ones, which are put aside as `damaged-…`.

        Where none is whole, all stay where they are: without them the run would look as if it had never had any.
        """
        damaged: dict[Path, DamagedError] = {}
        for path in self.paths():
            try:
                found = read_folder(path)
            except DamagedError as error:
                damaged[path] = error
                continue
            return found, [f"{error}; put aside as {_put_aside(bad)}" for bad, error in damaged.items()]
        return None, [str(error) for error in damaged.values()]


def _put_aside(path: Path) -> str:
    """Out of the way of a checkpoint of the same step; gives the new name."""
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside.name


def _checked_manifest(folder: Path) -> Any:
    """The manifest, if all files are what it says. What may not be read, or only by another version, is not damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise AcutanceError(
                f"{folder} has the format {manifest['format']!r} and this version of Acutance reads {FORMAT!r}: go on "
                "with the version that wrote it"
            )
        for name, expected in manifest["files"].items():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise DamagedError(f"{folder}: {name!r} is no name of a tensor file")
            size, digest = _size_and_digest(folder / name)
            if size != expected["bytes"]:
                raise DamagedError(f"{folder}: {name} has {size} bytes of {expected['bytes']}")
            if digest != expected["sha256"]:
                raise DamagedError(f"{folder}: {name} was changed after it was written (its checksum differs)")
        if not isinstance(manifest["notes"], dict):
            raise DamagedError(f"{folder}: its notes are no table")
    except PermissionError as error:
        raise AcutanceError(f"{folder} may not be read by this user: {error}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder}: unreadable: {error!r}") from error
    return manifest


def _size_and_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _write_through(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """So that the names in it survive a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
