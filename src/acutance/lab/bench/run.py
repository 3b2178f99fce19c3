"""Runs groups of tables one after another, writes their CSV as they grow, and prints a summary."""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Picture

from acutance.errors import AcutanceError, first_line
from acutance.lab.bench import floor, language, measuring, results, steps
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Settings, Table, free

HEADINGS = {"heading": "", "images_per_s": "images/s", "ratio": "÷ baseline (quartiles)", "peak_mib": "peak MiB"}
HEADINGS |= {"memory_ratio": "memory ÷ baseline", "flops_ratio": "FLOPs ÷ baseline", "floor_ms": "floor ms"}
HEADINGS |= {"times_floor": "÷ floor", "share_percent": "% of training", "every_for_2_percent": "2 % from every"}
HEADINGS |= {"note": ""}  # other columns keep their names
COLUMNS = ("tokens", "variant", "mode", "ms", *list(HEADINGS)[1:])
WORDS = ("heading", "variant", "mode", "note")
# A group is a file. Its module says what it measures.
GROUPS: dict[str, Callable[[Settings], Iterable[Table]]] = {
    "steps-32": partial(steps.tables, name="steps-32"),
    "steps-224": partial(steps.tables, name="steps-224"),
    **{f"end-to-end-{batch}": partial(steps.end_to_end_tables, batch=batch) for batch in steps.BATCHES},
    "augment": steps.augment_tables,
    "eigen": steps.eigen_tables,
    "remedies": steps.remedy_tables,
    "micro": floor.tables,
    "efficiency": steps.efficiency_tables,
    "measure": measuring.tables,
    "monitor": measuring.monitor_tables,
    "long-training": language.tables,
    "long-tokens": measuring.operator_tables,
    "long-model": measuring.model_tables,
}


def chosen_groups(only: str | None) -> list[str]:
    """Groups by name, with commas between. `steps`, `end-to-end` and `long` select all groups that begin so."""
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
    """Write every group's CSV after each repetition, print its tables, and finally a summary of all."""
    written: list[Path] = []
    everything: list[Row] = []
    # The variants share code, and each is compiled by itself.
    with torch._dynamo.config.patch(recompile_limit=64):
        for name in names:
            command = f"acutance bench --only {name}{settings.options}"
            shared = results.provenance(settings.device, command, toy=not settings.on_gpu)
            dtype = str(settings.dtype).removeprefix("torch.")
            path = out / results.file_name(f"bench-{name}", settings.device, dtype)
            done: list[Row] = []
            for title, growing in GROUPS[name](settings):
                rows: list[Row] = []
                for rows in _grown(title, growing):
                    results.write_rows(path, [*done, *rows], shared)
                done += rows
                console.print(picture(title, rows))
                free()
            written += [path] if done else []
            everything += done
    console.print(headlines(everything))
    return written


def _grown(title: str, growing: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """The table's rows so far. If the table fails, they stay and a line says why."""
    start = time.perf_counter()
    print(f"{title} …", file=sys.stderr, flush=True)
    rows: list[Row] = []
    try:
        for found in growing:
            rows = [{"table": title, **row} for row in found]
            yield rows
    except Exception as error:  # the other tables still run
        traceback.print_exc()
        yield [*rows, {"table": title, "variant": "", "note": f"stopped: {first_line(error)}"}]
    print(f"{title}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def headlines(rows: Sequence[Row]) -> Picture:
    """One line per variant of a table: its fastest mode at the largest number of tokens."""
    timed = sorted((row for row in rows if "ms" in row), key=lambda row: (row.get("tokens", 0), -float(row["ms"])))
    best = {(row["table"], row["variant"]): row for row in timed}  # the last one stays
    shown, title = [], ""
    for key in dict.fromkeys((row["table"], row["variant"]) for row in rows if "ms" in row):
        shown.append({**best[key], "heading": key[0] if key[0] != title else ""})
        title = key[0]
    columns = ("heading", "tokens", "variant", "mode", "ms", "images_per_s", "ratio", "memory_ratio")
    return picture("Summary", shown, columns)


def picture(title: str, rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> Picture:
    """A table of medians, ratios with quartiles, and a row's other columns."""
    drawn = Picture(title=escape(title), title_justify="left", title_style="bold")
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    for name in shown:
        drawn.add_column(HEADINGS.get(name, name), justify="left" if name in WORDS else "right")
    for row in rows:
        cells = {name: str(row.get(name, "")) for name in shown}
        if row.get("ratios") and "ratio" in cells:
            cells["ratio"] += f" ({row['ratio_q1']} to {row['ratio_q3']})"
        drawn.add_row(*map(escape, cells.values()))
    return drawn
