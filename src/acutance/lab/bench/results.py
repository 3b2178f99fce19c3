"""Results as CSV. The file's name and its columns say how they were measured."""

import csv
import io
import json
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
from acutance.lab.files import finite

Row = dict[str, Any]


def hardware(device: str, *, toy: bool = False) -> str:
    """The GPU's name, or the kind of CPU. It says so if figures are at toy size and mean nothing."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU{', toy size' if toy else ''}"


def versions() -> str:
    """The versions of Python, PyTorch, CUDA and other installed packages that the figures depend on."""
    found = [f"python {platform.python_version()}, torch {torch.__version__}, cuda {torch.version.cuda}"]
    for package in ("timm", "transformers", "triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def provenance(device: str, command: str, *, toy: bool = False) -> Row:
    """The columns that say how a row was measured."""
    return {"device": hardware(device, toy=toy), "versions": versions(), "command": command}


def file_name(stem: str, device: str, dtype: str, *labels: str) -> str:
    """A file name made of the stem, device, dtype, versions and labels."""
    on_gpu = torch.device(device).type == "cuda"
    parts = [stem, slug(hardware(device)) if on_gpu else "cpu", dtype, f"torch{torch.__version__.split('+')[0]}"]
    parts += [f"cuda{torch.version.cuda}" if on_gpu else "", *map(slug, labels)]
    return "-".join(filter(None, parts)) + ".csv"


def slug(text: str) -> str:
    """Lower-case letters and digits, with dashes between words."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def command(program: str, given: Sequence[str], *, without: str = "--results") -> str:
    """The command that was run, without the option that names the file."""
    kept = [word for word in given if not word.startswith(f"{without}=")]
    if without in kept:
        position = kept.index(without)
        del kept[position : position + 2]
    return shlex.join([*program.split(), *kept])


def write_rows(path: Path, rows: Sequence[Row], shared: Mapping[str, Any]) -> Path:
    """Write all rows as one CSV, each with the shared columns. Missing values stay empty."""
    columns = list(dict.fromkeys([name for row in rows for name in row] + list(shared)))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **shared} for row in rows)
    return atomic_write(path, text.getvalue().encode())


def write_record(stem: Path, rows: Sequence[Row], spec: str, body: Mapping[str, Any]) -> None:
    """Write stem.csv, with floats in this format, and stem.json."""
    texts = [{k: format(v, spec) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    write_rows(stem.with_suffix(".csv"), texts, {})
    atomic_write(stem.with_suffix(".json"), json.dumps(finite(body), indent=1, ensure_ascii=False).encode())
