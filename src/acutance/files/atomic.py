"""Writing files so that an interruption never leaves half of one, and reading JSON back."""

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from acutance.errors import AcutanceError

T = TypeVar("T")


class MissingFileError(AcutanceError, FileNotFoundError):
    """There is no such file."""


def atomic_write(path: str | os.PathLike[str], content: bytes | Callable[[Path], object]) -> Path:
    """Write bytes, or call a function that writes the file it is given, next to `path`; then rename it into place."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem[:80]}.{uuid4().hex}{target.suffix}")
    try:
        temporary.touch()  # says at once, and always in the same words, where nothing can be written
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    except BaseException as error:  # Ctrl-C too: nothing half-written stays behind
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(target)  # nobody has heard of the neighbour
        raise
    return target


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, or an AcutanceError."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(f"there is no file {path}") from error
    except OSError as error:
        raise AcutanceError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: str | os.PathLike[str], form: str, build: Callable[[Any], T]) -> T:
    """What `build` makes of a JSON file whose "format" is `form`, such as "acutance-profile/1"."""
    return _built(read_bytes(path), f"{path}", form, build)


def read_lines(path: str | os.PathLike[str], form: str, build: Callable[[Any], T]) -> list[T]:
    """What `build` makes of every line of JSON, without a last line that a crash cut off."""
    *lines, _unfinished = read_bytes(path).split(b"\n")
    return [_built(line, f"{path}, line {number},", form, build) for number, line in enumerate(lines, 1)]


def append_line(path: str | os.PathLike[str], body: Mapping[str, Any]) -> None:
    """Append a line of JSON, after dropping one that a crash cut off."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def _built(content: bytes, where: str, form: str, build: Callable[[Any], T]) -> T:
    try:
        body = json.loads(content)
        if (found := body.get("format")) != form:
            raise AcutanceError(f"{where} has the format {found!r}, this version reads {form!r}")
        return build(body)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AcutanceError(f"{where} is not of the format {form!r}: {error}") from error
