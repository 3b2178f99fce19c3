"""The tables of a queue. They depend on its results alone, so every machine writes the same files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write
from acutance.lab.evaluate.statistics import holm, paired_t, sign_flip_p
from acutance.lab.queue.jobs import Block, Job, Queue, Row, digest_of
from acutance.lab.queue.results import Results
from acutance.lab.tasks import task_class
from acutance.measure.intervals import margin_of
from acutance.report.tables import markdown

APART = 0.5  # rows whose means differ by no more are not separated, whatever p is
SPLIT = {"tune": "val", "final": "test"}
TESTS = ("beside the first [95 %]", "paired t", "Holm", "sign-flip", "")
SAYS = {
    "tune": "Scores on the held-out slice of the training set, for choices; nothing here is a result on the test set.",
    "final": "Scores on the test set, which each configuration and seed was tested on once, with its last weights.",
}
ABOUT = (
    "Rows are compared with {} at the same seeds: the mean difference with its 95 % interval by Student's t. The "
    "paired t test gives p by itself, and after Holm's correction over the table. The exact sign-flip test gives "
    f"another p, which n pairs cannot bring below 2^(1−n). A row within ±{APART} of the first is not separated from "
    "it, nor is one whose corrected p is 0.05 or more.\n"
)
Line = Mapping[str, Any]


@dataclass(frozen=True)
class RowResults:
    """A row's lines by seed."""

    row: Row
    lines: Mapping[int, Line]
    diverged: tuple[int, ...]

    @property
    def example(self) -> Line:
        return next(iter(self.lines.values()))

    @property
    def headline(self) -> str:
        return str(self.example["headline"])

    def values(self, score: str) -> dict[int, float]:
        found = {seed: line["scores"].get(score) for seed, line in self.lines.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, read: Callable[[Line], float | None]) -> float:
        """Over seeds, without those whose value was no number."""
        found = [value for line in self.lines.values() if (value := read(line)) is not None]
        return fmean(found) if found else math.nan


Cells = Mapping[str, Callable[[RowResults], str]]


def write_tables(file: Path, results: Results) -> list[Path]:
    """Write a page for each block and an index, beside the queue's file."""
    queue, lines = Queue.load(file), results.read()
    pages = {f"{block.name}.md": page(block, lines) for block in queue.block}
    pages["README.md"] = index(queue, lines)
    return [atomic_write(file.parent / name, text.encode()) for name, text in pages.items()]


def index(queue: Queue, lines: Mapping[str, Line]) -> str:
    """The index: which runs are done."""
    rows = []
    for block in queue.block:
        jobs = list(block.jobs())
        done = f"{sum(job.key in lines for job in jobs)} of {len(jobs)}"
        rows.append([f"[{block.title}]({block.name}.md)", block.kind, str(len(block.row)), str(len(block.seeds)), done])
    table = markdown(("table", "kind", "rows", "seeds", "runs done"), rows)
    told = "These pages are written by `acutance reproduce --queue docs/evidence/queue/queue.toml --tables`."
    return f"# The queue\n\n{told} Every line of `results.jsonl` is one run.\n\n{table}"


def page(block: Block, lines: Mapping[str, Line]) -> str:
    """A block's page: scores, measurements by layer, and the cost of the runs."""
    jobs, found = list(block.jobs()), [row_results(block, row, lines) for row in block.row]
    done = sum(job.key in lines for job in jobs)
    fields = f" with `{' '.join(block.set)}`" if block.set else ""
    parts = [
        f"# {block.title}\n",
        f"{SAYS[block.kind]} {block.note}".rstrip() + "\n",
        f"Recipe `{block.recipe}`{fields}. Seeds {', '.join(map(str, block.seeds))}; {done} of {len(jobs)} runs.\n",
    ]
    known = [each for each in found if each.lines]
    if not known:
        return "\n".join([*parts, "No run is done yet.\n"])
    parts += [scores(block, known), ABOUT.format(known[0].row.label)]
    parts += ["## By layer\n", layers(known), "## Runs\n", runs(known)]
    missing = [(each, "no run yet") for each in found if not each.lines and not each.diverged]
    missing += [(each, f"diverged with seed {', '.join(map(str, each.diverged))}") for each in found if each.diverged]
    parts += ["Missing:\n", "".join(f"- {each.row.label}: {why}\n" for each, why in missing)] if missing else []
    return "\n".join(parts)


def row_results(block: Block, row: Row, lines: Mapping[str, Line]) -> RowResults:
    """A row's lines. Each must have the key of its definition; a tuning run never appears in a final table."""
    found, diverged = {}, []
    for seed in block.seeds:
        if (line := lines.get(Job(block, row, seed).key)) is None:
            continue
        if digest_of(line["definition"]) != line["key"] or line["definition"]["kind"] != line["kind"]:
            raise AcutanceError(f"the result {line['key']} ({line['label']}) is not of the run that its key names")
        if "diverged" in line:
            diverged.append(seed)
        elif (line["kind"], line["split"]) == (block.kind, SPLIT[block.kind]):
            found[seed] = line
    return RowResults(row, found, tuple(diverged))


def scores(block: Block, rows: Sequence[RowResults]) -> str:
    """All scores, and each row compared with the first: interval, paired t, Holm over the table, sign-flip."""
    first, score = rows[0], rows[0].headline
    better = 1 if task_class(first.example["definition"]["task.kind"]).higher_is_better else -1
    others = [name for name in first.example["scores"] if name != score]
    columns = ["row", "seeds", f"{score} [95 %]", *others, *TESTS]
    theirs = first.values(score)
    pairs = {
        each.row.label: [mine - theirs[seed] for seed, mine in each.values(score).items() if seed in theirs]
        for each in rows[1:]
    }
    ps = {label: p for label, differences in pairs.items() if (p := paired_t(differences)) is not None}
    corrected = dict(zip(ps, holm([*ps.values()]), strict=True))
    table = []
    for each in rows:
        values, label = list(each.values(score).values()), each.row.label
        cells = [label, str(len(values)), with_interval(values)]
        cells += [_number(fmean(each.values(name).values() or [math.nan])) for name in others]
        tests = [""] * len(TESTS)
        if differences := pairs.get(label):
            found = map(_p, (ps.get(label), corrected.get(label), sign_flip_p(differences)))
            tests = [with_interval(differences, sign=True), *found, verdict(differences, corrected.get(label), better)]
        table.append([*cells, *tests])
    return markdown(columns, table)


def verdict(differences: Sequence[float], p: float | None, better: int) -> str:
    """A word for the difference. Rows are separated if their means differ by more than APART and p is below 0.05."""
    mean = fmean(differences)
    if abs(mean) <= APART or p is None or p >= 0.05:
        return "not separated"
    return "better" if mean * better > 0 else "worse"


def layers(rows: Sequence[RowResults]) -> str:
    """Smoothing in the first, middle and last layer, and the spectra of H over all layers."""
    cells: Cells = {
        "token cosine, stream": partial(_by_layer, tap="block", metric="token_cosine"),
        "token cosine, branch": partial(_by_layer, tap="attention", metric="token_cosine"),
        "HFC/LFC, stream": partial(_by_layer, tap="block", metric="hfc_lfc_frobenius"),
        "successive maps, mean": lambda row: _number(
            row.mean(lambda line: fmean(line["layers"]["attention_matrix"]["attention_cosine"].values()))
        ),
        "λ < 0, γ ignored": partial(_negative, norm="ignore"),
        "λ < 0, γ folded": partial(_negative, norm="fold"),
    }
    return _table(rows, cells) + "\nLayers: the first, the middle and the last; mean over seeds.\n"


def runs(rows: Sequence[RowResults]) -> str:
    """The size and cost of a row's runs: medians over seeds. What a resumed run took is not known."""
    cells: Cells = {
        "parameters": partial(_listed, read=lambda line: f"{line['parameters']:,}"),
        "images seen": partial(_listed, read=lambda line: f"{line['images_seen']:,}"),
        "step, ms": partial(_median, read=lambda line: line["step_ms"]),
        "run, s": partial(_median, read=lambda line: line["seconds"] if line["sessions"] == 1 else None),
        "at once, at most": partial(_listed, read=lambda line: str(line["workers"])),
        "memory, MiB": partial(_median, read=lambda line: line["memory_mib"]),
        "on": partial(_listed, read=lambda line: line["machine"]),
        "commits": partial(_listed, read=lambda line: (line["git"] or {"commit": "unknown"})["commit"][:10]),
    }
    return _table(rows, cells)


def _table(rows: Sequence[RowResults], cells: Cells) -> str:
    return markdown(["row", *cells], ([r.row.label, *(cell(r) for cell in cells.values())] for r in rows))


def _by_layer(row: RowResults, *, tap: str, metric: str) -> str:
    def at(layer: int) -> str:
        return _number(row.mean(lambda line: line["layers"][tap][metric][str(layer)]))

    depth = max(int(layer) for layer in row.example["layers"]["block"]["token_cosine"])
    return ", ".join(map(at, sorted({1, (depth + 1) // 2, depth})))


def _negative(row: RowResults, *, norm: str) -> str:
    return f"{row.mean(lambda line: fmean(line['spectra'][norm]['negative_share'])):.1%}"


def _listed(row: RowResults, *, read: Callable[[Line], str]) -> str:
    return ", ".join(sorted({read(line) for line in row.lines.values()}))


def _median(row: RowResults, *, read: Callable[[Line], float | None]) -> str:
    found = [value for line in row.lines.values() if (value := read(line)) is not None]
    return f"{median(found):,.1f}" if found else "–"


def with_interval(values: Sequence[float], *, sign: bool = False) -> str:
    """`72.17 [71.9, 72.4]`, or the mean alone for one seed."""
    spec = "+.2f" if sign else ".2f"
    mean, half = fmean(values), margin_of(values)
    return f"{mean:{spec}}" + ("" if math.isnan(half) else f" [{mean - half:{spec}}, {mean + half:{spec}}]")


def _number(value: float) -> str:
    return f"{value:.3f}"


def _p(p: float | None) -> str:
    return "–" if p is None else f"{p:.2g}" if p >= 1e-4 else "< 0.0001"
