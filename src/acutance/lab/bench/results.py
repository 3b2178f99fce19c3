"""Results as CSV: the file's name and its columns say how they came about."""

import csv
import io
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from acutance.files.atomic import atomic_write

Row = dict[str, Any]


def hardware(device: str, *, toy: bool = False) -> str:
    """The GPU's name, or the kind of CPU; at toy size a figure means nothing, and it says so."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU{', toy size' if toy else ''}"


def versions() -> str:
    """Of Python, PyTorch and CUDA, and of what else the figures depend on where it is installed."""
    found = [f"python {platform.python_version()}, torch {torch.__version__}, cuda {torch.version.cuda}"]
    for package in ("timm", "transformers", "triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def provenance(device: str, command: str, *, toy: bool = False) -> Row:
    """What every row says of how it came about."""
    return {"device": hardware(device, toy=toy), "versions": versions(), "command": command}


def file_name(stem: str, device: str, dtype: str, *labels: str) -> str:
    """All of a file's name, so that none needs to be given one by hand: device, dtype, versions, labels."""
    on_gpu = torch.device(device).type == "cuda"
    parts = [stem, slug(hardware(device)) if on_gpu else "cpu", dtype, f"torch{torch.__version__.split('+')[0]}"]
    parts += [f"cuda{torch.version.cuda}" if on_gpu else "", *map(slug, labels)]
    return "-".join(filter(None, parts)) + ".csv"


def slug(text: str) -> str:
    """Small letters and digits, with a dash between words."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def command(program: str, given: Sequence[str], *, without: str = "--results") -> str:
    """What was measured, as a command; where the file went is not part of it."""
    kept = [word for word in given if not word.startswith(f"{without}=")]
    if without in kept:
        position = kept.index(without)
        del kept[position : position + 2]
    return shlex.join([*program.split(), *kept])


def write_rows(path: Path, rows: Sequence[Row], shared: Mapping[str, Any]) -> Path:
    """One CSV of all rows, each with what they share; what a row does not have stays empty."""
    columns = list(dict.fromkeys([name for row in rows for name in row] + list(shared)))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **shared} for row in rows)
    return atomic_write(path, text.getvalue().encode())
