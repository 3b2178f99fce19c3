"""Results as CSV: the file's name and its columns say how they came about."""

import argparse
import csv
import io
import platform
import re
import shlex
import sys
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


def script_parser(doc: str | None, *, device: bool = True) -> argparse.ArgumentParser:
    """The options that the scripts in benchmarks/ share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="where the CSV goes")
    if device:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=["cpu", "cuda"], default=found, help="on the CPU a toy size runs")
    return parser


def script_rows(
    stem: str, rows: Sequence[Row], folder: Path, device: str, dtype: str, *labels: str, toy: bool = True, **shared: Any
) -> Path:
    """Write the CSV of a script in benchmarks/; on the CPU it says that the size is a toy's."""
    how = command(f"python benchmarks/{stem}.py", sys.argv[1:])
    shared |= provenance(device, how, toy=toy and device == "cpu")
    return write_rows(folder / file_name(stem, device, dtype, *labels), rows, shared)


def show(rows: Sequence[Row], *columns: str) -> None:
    """Print these columns of a script's rows, aligned."""
    table = [columns, *(tuple(str(row.get(name, "")) for name in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


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
