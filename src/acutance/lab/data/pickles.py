"""Pickles of arrays and plain values only. Anything else in a pickle is code that would run, and is refused."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


def _encode(text: str, encoding: str) -> bytes:
    """How protocols 0 to 2 spell bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes spelt in {encoding!r}")
    return text.encode("latin1")


# What the pickles of arrays call, under the names of NumPy 1 and 2; none of it runs anything but itself.
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): np.empty(1).__reduce_ex__(5)[0] for core in ("core", "_core")},
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data needs; it was not run")
        return ALLOWED[module, name]


def load_plain(content: bytes) -> Any:
    """What a pickle holds, bytes for Python 2's strings; `pickle.UnpicklingError` if it is damaged or asks for code."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise pickle.UnpicklingError(f"not a whole pickle: {error}") from error
