"""Writing files so that an interruption never leaves half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def atomic_write(path: str | os.PathLike[str], content: bytes | Callable[[Path], object]) -> Path:
    """Write to a temporary neighbour, flush it to disk, then rename it into place.

    Args:
        path: where the file shall stand; missing folders are made.
        content: the bytes, or a function that writes the file it is given.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would hide the result from colleagues
        temporary.replace(target)
    except BaseException:  # Ctrl-C too: nothing half-written stays behind
        temporary.unlink(missing_ok=True)
        raise
    return target
