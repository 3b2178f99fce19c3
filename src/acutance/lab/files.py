"""Checksums of files, and values made ready for JSON."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def short(value: Any) -> Any:
    """Floats rounded to six digits, which is more than the data justify and any table shows."""
    if isinstance(value, Mapping):
        return {key: short(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [short(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
