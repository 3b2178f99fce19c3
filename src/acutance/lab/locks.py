"""Locks that the system releases when their process ends, in whatever way."""

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from acutance.errors import AcutanceWarning


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Yields True if this process holds the lock, False if another process does, on this or another machine.

    The file is never removed, since that could remove another process's lock. NFS from version 4 has such locks, and
    so has Lustre if it is mounted with flock. Without locks there is a warning, and the lock counts as held.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not (taken := isinstance(error, BlockingIOError)):
                why = f"{path.parent} is on a file system without locks ({error.strerror})"
                warnings.warn(f"{why}: two processes may do the same work", AcutanceWarning, stacklevel=3)
            yield not taken
            return
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}\n")
        file.flush()
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough while a forked child also has the file open


def holder(path: Path) -> str:
    """The last holder, e.g. `node7, process 4711`."""
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"
