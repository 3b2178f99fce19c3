"""Writing files so that an interruption never leaves half of one."""

import errno
import json
import os
from collections.abc import Callable
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
    try:
        body = json.loads(read_bytes(path))
        if not isinstance(body, dict) or "format" not in body:
            raise ValueError("it does not name its format")
        if body["format"] != form:
            raise AcutanceError(f"{path}: format {body['format']!r}, this version reads {form!r}")
        return build(body)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AcutanceError(f"{path} is not a file of the format {form!r}: {error}") from error
