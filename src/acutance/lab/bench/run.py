"""Runs groups of tables one after another, writes their CSV as they grow, and sums them up."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Picture

from acutance.errors import AcutanceError, first_line
from acutance.lab.bench import efficiency, floor, language, lengths, measuring, results, steps, throughput
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table, free

HEADINGS = {
    "heading": "",
    "tokens": "tokens",
    "variant": "variant",
    "mode": "mode",
    "ms": "ms",
    "images_per_s": "images/s",
    "ratio": "÷ baseline (quartiles)",
    "peak_mib": "peak MiB",
    "memory_ratio": "memory ÷ baseline",
    "flops_ratio": "FLOPs ÷ baseline",
    "floor_ms": "floor ms",
    "times_floor": "÷ floor",
    "note": "",
}
COLUMNS = tuple(name for name in HEADINGS if name != "heading")
WORDS = ("heading", "variant", "mode", "note")
# A group is a file; what it measures stands in its module.
GROUPS: dict[str, Callable[[Settings], list[Table]]] = {
    "steps-32": partial(steps.tables, name="steps-32"),
    "steps-224": partial(steps.tables, name="steps-224"),
    **{f"end-to-end-{batch}": partial(throughput.tables, batch=batch) for batch in throughput.BATCHES},
    "eigen": steps.eigen_tables,
    "micro": floor.tables,
    "efficiency": efficiency.tables,
    "measure": measuring.tables,
    "long-training": language.tables,
    "long-tokens": lengths.operator_tables,
    "long-model": lengths.model_tables,
}


def chosen_groups(only: str | None) -> list[str]:
    """Groups by name, with commas between; `steps`, `end-to-end` and `long` are all that begin so."""
    if only is None:
        return list(GROUPS)
    found: list[str] = []
    for word in map(str.strip, only.split(",")):
        matching = [name for name in GROUPS if name == word or name.startswith(f"{word}-")]
        if not matching:
            known = ", ".join([*GROUPS, "steps", "end-to-end", "long"])
            raise AcutanceError(f"--only {word!r}: there is no such group; known: {known}")
        found += [name for name in matching if name not in found]
    return found


def run_groups(names: Sequence[str], settings: Settings, out: Path, console: Console) -> list[Path]:
    """Every group's CSV, rewritten after each repetition; a summary of all at the end."""
    written: list[Path] = []
    rows: list[Row] = []
    # The variants share their code, and each is compiled for itself.
    with torch._dynamo.config.patch(recompile_limit=64):
        for name in names:
            path, found = _run_group(name, settings, out, console)
            written += [path] if found else []
            rows += found
    console.print(headlines(rows))
    return written


def _run_group(name: str, settings: Settings, out: Path, console: Console) -> tuple[Path, list[Row]]:
    shared = results.provenance(
        settings.device, f"acutance bench --only {name}{settings.options}", toy=not settings.on_gpu
    )
    path = out / results.file_name(f"bench-{name}", settings.device, settings.dtype_name)
    done: list[Row] = []
    for table in GROUPS[name](settings):
        rows: list[Row] = []
        for rows in _grown(table):
            results.write_rows(path, [*done, *rows], shared)
        done += rows
        console.print(picture(table.title, rows))
        free()
    return path, done


def _grown(table: Table) -> Iterator[list[Row]]:
    """The table's rows so far; where it cannot go on, they stay and a line says why."""
    start = time.perf_counter()
    print(f"{table.title} …", file=sys.stderr, flush=True)
    rows: list[Row] = []
    failure = ""
    try:
        for found in table.rows():
            rows = [{"table": table.title, **row} for row in found]
            yield rows
    except Exception as error:  # whatever it is, the other tables get their turn
        traceback.print_exc()
        failure = first_line(error)
    if failure:
        yield [*rows, {"table": table.title, "variant": "", "note": f"stopped: {failure}"}]
    print(f"{table.title}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def headlines(rows: Sequence[Row]) -> Picture:
    """One line per variant of a table: its fastest mode, at its most tokens."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["table"], row["variant"])
        if "ms" in row and (key not in best or _better(row, best[key])):
            best[key] = row
    shown: list[Row] = []
    for row in best.values():
        first_of_its_table = not any(other["table"] == row["table"] for other in shown)
        shown.append({**row, "heading": row["table"] if first_of_its_table else ""})
    return picture(
        "Summary", shown, ("heading", "tokens", "variant", "mode", "ms", "images_per_s", "ratio", "memory_ratio")
    )


def _better(row: Row, other: Row) -> bool:
    if row.get("tokens") != other.get("tokens"):
        return bool(row["tokens"] > other["tokens"])
    return float(row["ms"]) < float(other["ms"])


def picture(title: str, rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> Picture:
    """The medians, the ratios with their quartiles, and what else a row has."""
    drawn = Picture(title=escape(title), title_justify="left", title_style="bold")
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    for name in shown:
        drawn.add_column(HEADINGS[name], justify="left" if name in WORDS else "right")
    for row in rows:
        drawn.add_row(*(escape(_cell(row, name)) for name in shown))
    return drawn


def _cell(row: Row, name: str) -> str:
    text = str(row.get(name, ""))
    if name.endswith("ratio") and row.get(f"{name}s"):
        return f"{text} ({row[f'{name}_q1']} to {row[f'{name}_q3']})"
    return text
