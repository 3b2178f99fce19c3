"""The files in benchmarks/results and docs/evidence, and figures as the pages write them."""

import csv
import re
import statistics
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU = "nvidia-h200-bfloat16-torch2.11.0-cuda13.0"
STEPS = {"steps-32": "ViT-Ti/4 at 32×32", "steps-224": "DeiT-Ti/16 at 224×224"}
TOKENS, ATTENTION, MATRICES = "token metrics", "and attention energy and entropy", "the same by whole matrices"
DEIT, MANY = (f"timm's DeiT-Ti/16, 224×224, batch {batch}" for batch in (256, 1024))
OURS, SMALL = DEIT.removeprefix("timm's "), "timm's ViT-Ti/4, 32×32, batch 256"
LLAMA = "Llama of 1.2 billion parameters, 4 texts of 2048 tokens"

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def rows_of(name: str, ending: str = "") -> list[Row]:
    return read(RESULTS / f"{name}-{GPU}{ending}.csv")


def one(rows: list[Row], **wanted: str) -> Row:
    """The row whose columns are, or for `table` end in, these."""
    (found,) = [
        row for row in rows if all(row[k].endswith(v) if k == "table" else row[k] == v for k, v in wanted.items())
    ]
    return found


def step(part: str, table: str, variant: str, mode: str = "reduce-overhead") -> Row:
    return one(rows_of(f"bench-{part}"), table=table, variant=variant, mode=mode)


def measured(model: str, variant: str, ending: str = "") -> Row:
    return one(rows_of("bench-measure", ending), table=f"measuring {model}", variant=variant)


def trained(evidence: str, label: str) -> tuple[list[int], int]:
    """Seconds of all runs, the shortest first, and images/s to the nearest thousand."""
    rows = read(ROOT / "docs" / "evidence" / evidence / "time.csv")
    rows = [row for row in rows if row["run"].startswith(f"cifar100-{label}")]
    seconds = sorted(int(rounded(row["seconds"], 0)) for row in rows)
    return seconds, 1000 * round(statistics.median(int(row["median_speed"]) for row in rows) / 1000)


def rounded(value: str | float, digits: int) -> str:
    """As one rounds by hand: what is half goes up, which a binary number that is nearly half need not."""
    return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def with_quartiles(row: Row, digits: int = 3, of: str = "ratio") -> str:
    middle, low, high = (rounded(row[f"{of}{end}"], digits) for end in ("", "_q1", "_q3"))
    return f"{middle} ({low} to {high})"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("  ", " ")  # an empty cell is one space


def span(text: str, heading: str, place: int) -> tuple[int, int]:
    """Where the rows of a table stand in a page, below its head."""
    start = text.index(f"# {heading}\n") + len(heading) + 3
    end = text.find("\n#", start)
    found = list(re.finditer(r"(?:^\|.*\n)+", text[start : None if end < 0 else end + 1], re.MULTILINE))[place]
    rows = found.group().splitlines(keepends=True)
    return start + found.start() + len("".join(rows[:2])), start + found.end()


def updated(page: str, heading: str, place: int, expected: Iterable[str]) -> str:
    """The page with the table's rows as expected; rows that differ in bold type alone stay as they are."""
    text = (ROOT / page).read_text(encoding="utf-8")
    start, end = span(text, heading, place)
    kept = {row.replace("**", ""): row for row in text[start:end].splitlines()}
    return text[:start] + "".join(f"{kept.get(row, row)}\n" for row in expected) + text[end:]


def missing(page: str, sentences: Iterable[str]) -> list[str]:
    """The sentences that the page does not say."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("**", "").split())
    return [sentence for sentence in sentences if sentence not in text]
