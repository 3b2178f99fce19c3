"""Writes the tables of the pages from benchmarks/results and docs/evidence, and finds sentences that say otherwise.

    python docs/figures.py

A row that says what its file says is left as it is. Sentences are not written: those that are missing are named.
"""

import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from acutance.diagnose.findings import DETECTORS
from acutance.explain.spectral_theory import rank_correlation
from acutance.lab.robustness import CORRUPTIONS, SEVERITIES, RobustnessTable
from acutance.lab.studies.layers import middle_and_range
from acutance.lab.sweep.table import Sweep
from acutance.measure.profile import Profile

ROOT = Path(__file__).parents[1]
RESULTS, EVIDENCE = ROOT / "benchmarks" / "results", ROOT / "docs" / "evidence"
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


def eigen(variant: str) -> Row:
    return one(rows_of("bench-eigen"), variant=variant, mode="reduce-overhead")


def measured(model: str, variant: str, ending: str = "") -> Row:
    return one(rows_of("bench-measure", ending), table=f"measuring {model}", variant=variant)


def times(evidence: str, label: str) -> list[Row]:
    """A row for each seed."""
    return [r for r in read(EVIDENCE / evidence / "time.csv") if r["run"].startswith(f"cifar100-{label}")]


def trained(evidence: str, label: str) -> tuple[list[int], int]:
    """Seconds of all runs, the shortest first, and images/s to the nearest thousand."""
    rows = times(evidence, label)
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


# bench.md


def beside(row: Row) -> str:
    """The ratio as a table has it: 1 where it is the baseline, without quartiles where it has none."""
    if row["note"] == "the baseline":
        return "1"
    return with_quartiles(row) if row["ratio_q1"] else rounded(row["ratio"], 3)


def step_table(part: str) -> Iterator[str]:
    rows = rows_of(f"bench-{part}")
    for row in (row for row in rows if row["table"].endswith("training") and row["mode"] != "default"):
        again = one(rows, table="inference", variant=row["variant"], mode=row["mode"])
        yield line(row["variant"], *(cell for r in (row, again) for cell in (rounded(r["ms"], 2), beside(r))))


def end_to_end_table() -> Iterator[str]:
    ways = {"recorded": ["recorded as a CUDA graph", "recorded"], "launched": ["launched kernel by kernel", "launched"]}
    for row in rows_of("bench-end-to-end-1024"):
        how = ways[row["mode"]][row["variant"] == "NeuTRENO"]
        yield line(f"{row['variant']}, {how}", rounded(row["images_per_s"], 0), rounded(row["ms"], 2), beside(row))


def micro_table() -> Iterator[str]:
    rows = rows_of("bench-micro")
    names = {
        "SDPA, plain": "SDPA without the term",
        "SDPA, with the term": "SDPA and the term",
        "fused kernel, plain": "ours without",
        "fused kernel, with the term": "ours with the term",
    }
    forward = [("forward", variant) for variant in ("SDPA, plain", "fused kernel, with the term")]
    for what, variant in [*forward, *(("forward and backward", variant) for variant in names)]:
        cells = []
        for size in ("1024, 64", "1024, 65", "512, 197"):
            row = one(rows, table=f"batch {size} tokens, 3 heads of width 64, {what}", variant=variant)
            cells.append(f"{rounded(1e3 * float(row['ms']), 0)} ({rounded(row['times_floor'], 1)})")
        yield line(f"{what}, {names[variant]}", *cells)


def efficiency_table() -> Iterator[str]:
    rows = rows_of("bench-efficiency")
    for mode in ("fused kernel", "SDPA"):
        row = one(rows, variant="NeuTRENO", mode=mode)
        yield line(mode, *(rounded(row[name], 4) for name in ("flops_ratio", "memory_ratio")), with_quartiles(row, 4))


def eigen_table() -> Iterator[str]:
    for basis in ("polar", "cayley", "householder", "qr"):
        row = eigen(f"eigen:negative,basis={basis}")
        yield line(f"`{basis}`", rounded(row["ms"], 2), with_quartiles(row))


def long_training_table() -> Iterator[str]:
    short, long = (
        [row for row in rows_of("bench-long-training") if f" {tokens} tokens" in row["table"]]
        for tokens in (2048, 8192)
    )
    for pair in zip(short, long, strict=True):
        name = pair[0]["variant"].replace("fused kernel", "our kernel")
        yield line(name, *(cell for row in pair for cell in (rounded(row["ms"], 2), beside(row))))


def measure_table() -> Iterator[str]:
    names = {
        "Llama, 1.2 billion parameters, 4 × 2048 tokens": LLAMA,
        "timm's DeiT-Ti, 256 images": DEIT,
        "timm's DeiT-Ti, 1024 images": MANY,
        "our DeiT-Ti, 256 images": OURS,
    }
    for name, model in names.items():
        variants = ("plain forward pass", TOKENS, ATTENTION, MATRICES)
        plain, tokens, attention, matrices = (measured(model, variant) for variant in variants)
        yield line(
            name, rounded(plain["ms"], 1),
            with_quartiles(tokens), rounded(tokens["memory_ratio"], 3), with_quartiles(attention),
            rounded(matrices["ratio"], 2), rounded(matrices["memory_ratio"], 1),
        )  # fmt: skip


def busy_host_table() -> Iterator[str]:
    machines = {
        "first, 76428e4": "-busy-host",
        "second, 891d997": "-busy-host-2",
        "third, c15db5d": "-busy-host-3",
        "third, 891d997 right after, `--quick`": "-891d997",
        "fourth, 98527e9": "-busy-host-4",
        "fifth, 8860a61": "-busy-host-5",
    }
    for machine, ending in machines.items():
        pairs = [measured(model, name, ending) for model in (DEIT, MANY, LLAMA) for name in (TOKENS, ATTENTION)]
        smallest = "" if "quick" in machine else f", smallest {rounded(pairs[0]['ratio_min'], 3)}"
        others = [rounded(row["ratio"], 3) for row in pairs[1:]]
        yield line(machine, with_quartiles(pairs[0]) + smallest, *others)


def long_model_table() -> Iterator[str]:
    rows = rows_of("bench-long-model")
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        variants = ("plain forward pass", "measure", "by whole matrices")
        plain, read, matrices = (one(rows, tokens=tokens, variant=variant) for variant in variants)
        ms = rounded(plain["ms"], 1 if float(plain["ms"]) < 100 else 0)
        if matrices["ms"]:
            last = [f"{float(matrices['ratio']):#.3g}", rounded(matrices["memory_ratio"], 0)]
        else:
            last = ["out of memory" if "out of memory" in matrices["note"] else "", ""]
        count = tokens if len(tokens) < 5 else f"{int(tokens):,}"
        yield line(count, ms, rounded(read["ratio"], 2), rounded(read["memory_ratio"], 3), *last)


def said_of_steps() -> Iterator[str]:
    for part in STEPS:
        timm, ours = (step(part, "training", variant, "default") for variant in ("timm's ViT", "NeuTRENO"))
        peaks = (rounded(ours["peak_mib"], 0), rounded(ours["memory_ratio"], 3), rounded(timm["peak_mib"], 0))
        yield "peak memory in a training step is {} MiB, {} of timm's {}".format(*peaks)
        plain, held = (step(part, "inference", variant, "default") for variant in ("timm's ViT", "NeuTRENO"))
        ratio = rounded(held["memory_ratio"], 2)
        where = " in mode `default`" if part == "steps-32" else ""
        yield f"At inference it is {held['peak_mib']} against {plain['peak_mib']} MiB{where}, {ratio} of it"
        ms = [rounded(row["ms"], 1) for row in (timm, ours)]
        told = "timm's step takes {} ms, NeuTRENO's {}," if part == "steps-32" else "{1} ms, timm's {0}."
        yield told.format(*ms)
    times = (rounded(step("steps-32", "training", name)["times_floor"], 1) for name in ("NeuTRENO", "timm's ViT"))
    yield "The step takes {} times its floor, timm's {} times.".format(*times)
    slowest = [
        float(row["ms_max"]) / float(row["ms_min"])
        for row in (step("steps-32", "training", name, "default") for name in ("timm's ViT", "NeuTRENO"))
    ]
    assert {rounded(ratio, 1) for ratio in slowest} == {"1.3"}
    yield "one repetition may take 1.3 times as long as another"
    values = 1024 * 65 * 192 * 2 / 2**20  # of one layer, in bfloat16
    yield f"v⁰ takes {rounded(values, 1)}, but"
    yield f"q and k stay through all layers: {rounded(3 * values, 1)} MiB"
    baseline = step("steps-224", "inference", "timm's ViT", "default")
    assert baseline["note"] == "the baseline"
    yield f"in mode `default`, {rounded(baseline['ms'], 2)} ms too"


def said_of_other_tables() -> Iterator[str]:
    plain, ours = (one(rows_of("bench-efficiency"), variant=v, mode="fused kernel") for v in ("plain", "NeuTRENO"))
    yield f"the first takes {rounded(float(ours['ms']) / float(plain['ms']), 4)}, as a quotient"
    yield f"batch 1024, {rounded(eigen('plain ViT')['ms'], 2)} ms), both in CUDA graphs"
    rows = rows_of("bench-long-training")
    pairs = []
    for size in ("2048 tokens, batch 16", "8192 tokens, batch 4"):
        where = f"causal LM, {size}, 6 layers of 768 channels, training"
        ours = one(rows, table=where, variant="NeuTRENO, fused kernel")
        assert ours["beside"].startswith("plain, SDPA flash")
        pairs.append(with_quartiles(ours, of="beside_ratio"))
        assert float(ours["memory_ratio"]) <= 1.0002
    yield "NeuTRENO takes {} and {} of the plain model's time".format(*pairs)
    tuned = one(rows_of("bench-max-autotune-steps-32"), table="training", variant="timm's ViT", mode="max-autotune")
    yield f"timm's training step took {with_quartiles(tuned)} of that in `reduce-overhead`"
    again = one(rows_of("bench-max-autotune-steps-32"), table="training", variant="NeuTRENO", mode="reduce-overhead")
    yield f"NeuTRENO's {with_quartiles(again)} beside it"
    memory = (rounded(measured(model, ATTENTION)["memory_ratio"], 2) for model in (DEIT, OURS, LLAMA))
    yield "Energy and entropy take {} of timm's memory, {} of ours and {} of the Llama's".format(*memory)
    spectral = f"{OURS.replace('256', '32')}, spectral metrics"
    forward, read = (measured(spectral, name) for name in ("plain forward pass", "default token metrics"))
    yield f"{rounded(float(read['ms']) / 1e3, 1)} s for 32 images"
    yield f"whose forward pass takes {rounded(forward['ms'], 1)} ms"
    waiting = {
        "-busy-host-3": "{} with token metrics and {} with energy",
        "-891d997": "{} and {} at 891d997",
        "-busy-host-4": "{} and {} at 98527e9 on the fourth",
        "-busy-host-5": "{} and {} at 8860a61 on the fifth",
    }
    for ending, told in waiting.items():
        yield told.format(*(with_quartiles(measured(SMALL, variant, ending)) for variant in (TOKENS, ATTENTION)))
    names = ("nonlocal_energy", "attention_entropy", "extreme_eigenvalues", "log_nonlocal_energy_raw")
    energy, entropy, extreme, raw = (one(rows_of("bench-long-tokens"), tokens="32768", variant=name) for name in names)
    ratios = rounded(energy["ratio"], 1), rounded(entropy["ratio"], 2)
    yield "energy takes {} times as long as A v, entropy {} times".format(*ratios)
    yield f"the extreme eigenvalues {rounded(float(extreme['ms']) / 1e3, 1)} s and"
    yield f"pair by pair, {rounded(float(raw['ms']) / 1e3, 0)} s."
    (steered, faster), (plain, fastest) = (trained("cifar100-batch1024", label) for label in ("neutreno", "plain"))
    yield f"see {fastest:,} and, with NeuTRENO, {faster:,} images/s"
    yield f"they take {min(steered + plain)} to {sorted(steered + plain)[-2]} s once compiled"


# operator.md


def operator_memory_table() -> Iterator[str]:
    rows = read(RESULTS / "operator_memory-cuda-bfloat16-torch2.11.0.csv")
    names = {"logsumexp": "A.logsumexp()", "eigenvalues(k=4)": "A.eigenvalues(k=4)", "stationary": "A.stationary()"}
    for operation in ("A @ x", "A.T @ y", *names):
        cells = []
        for row in (one(rows, tokens=tokens, op=operation) for tokens in ("2048", "8192", "32768")):
            share = 100 * float(row["peak_to_matrix"])
            cells.append(f"{rounded(row['peak_mib'], 0)} ({rounded(share, 1 if share < 10 else 0)} %)")
        yield line(f"`{names.get(operation, operation)}`", *cells)


# kernels.md

LONG_HEADS = {"width": "64", "kv_heads": "16"}
LONG_CASES = (
    [{"tokens": n, **LONG_HEADS} for n in ("2048", "8192")],
    [{"width": width} for width in ("16", "32", "128")],
)


def long_kernel(part: str, name: str, **case: str) -> str:
    """Milliseconds; of ours those of the tiles in use, which the script names first."""
    rows = [row for row in rows_of("long_kernels") if row["part"] == part and all(row[k] == v for k, v in case.items())]
    row = next(row for row in rows if row["variant"].startswith("ours")) if name == "ours" else one(rows, variant=name)
    return rounded(row["ms"], 3)


def long_kernel_table(cases: list[Row]) -> Iterator[str]:
    names = {f"SDPA {name}{term}": "" for name in ("flash", "cudnn") for term in ("", " + correction")}
    for name, ending in {**names, "ours": ", correction included"}.items():
        found = (long_kernel(part, name, **case) for case in cases for part in ("forward", "backward"))
        yield line(name.replace("cudnn", "cuDNN") + ending, *found)


def mlp_table() -> Iterator[str]:
    rows = rows_of("mlp-one-kernel")
    for part, name in (("training", "training pass"), ("inference", "inference")):
        for tokens in ("65536", "100352"):
            plain, ours = (one(rows, part=part, tokens=tokens, variant=variant) for variant in ("PyTorch", "ours"))
            ms = (rounded(row["ms"], 3) for row in (plain, ours))
            yield line(f"{name}, {int(tokens):,} tokens", *ms, with_quartiles(ours))


def mlp_tile_table() -> Iterator[str]:
    rows = [row for row in rows_of("mlp-tiles") if row["tokens"] == "65536"]
    names = {
        "y and h, not compiled": ("whole", "ours, (128, 64, 8, 3, 1000000, None)"),
        "dh and the gradient of b₁, GELU(h) not made again, not compiled": (
            "backward", "ours, (64, 128, 4, 1, 396, 168)",
        ),
        "y alone, compiled, with two stages instead of three": ("inference", "both products in one"),
    }  # fmt: skip
    for name, (part, variant) in names.items():
        plain, ours = one(rows, part=part, variant="PyTorch"), one(rows, part=part, variant=variant)
        yield line(name, plain["ms"], ours["ms"], rounded(ours["ratio"], 3))


def said_of_kernels() -> Iterator[str]:
    def tile(name: str, part: str, *sizes: int | None) -> str:
        return rounded(one(rows_of(name), part=part, tokens="65536", variant=f"ours, {sizes}")["ratio"], 3)

    forward = sorted(row["ratio"] for row in rows_of("mlp-one-kernel") if row["part"] == "forward")
    chosen = tile("mlp-one-kernel", "forward", 128, 64, 8, 3, 0, None)
    assert chosen == rounded(forward[0], 3)
    yield f"forwards is the fastest ({chosen} of PyTorch's time, the next {rounded(forward[1], 3)})"
    other, own = (64, 64, 4, 1, 528, 128), (64, 128, 4, 1, 396, 168)
    now, before = (
        [tile(name, "backward", *sizes) for sizes in (other, own)] for name in ("mlp-one-kernel", "mlp-tiles")
    )
    yield "took {} and the one in use {}".format(*now)
    yield "it was {} against {}".format(*before)
    parts, names = ("forward", "backward"), ("ours", "SDPA cudnn + correction")
    pairs = (long_kernel(part, name, kv_heads="4") for part in parts for name in names)
    yield "ours took {} ms forwards and cuDNN's with the correction {}, backwards {} and {}".format(*pairs)
    memory = rounded(step("steps-224", "training", "NeuTRENO", "default")["memory_ratio"], 2)
    yield f"[{memory}](bench.md#deit-ti16-at-224224) of the memory of a training step"
    # Two tiles forwards, each once the first of ours and once not.
    own, other = ("ours 64 64 4 3 128", "ours 128 64 8 3 128")

    def ms(ending: str, variant: str) -> list[str]:
        rows = rows_of("long_kernels", ending)
        found = (one(rows, part="forward", tokens=n, **LONG_HEADS, variant=variant) for n in ("2048", "8192"))
        return [rounded(row["ms"], 3) for row in found]

    yield "had {} and {} ms forwards for the same tile".format(*ms("-other-order", own))
    yield "for the one that came first there {} and {}".format(*ms("-other-order", other))
    yield "this run has {} and {} for it".format(*ms("", other))


# steer.md


def family_tables() -> tuple[list[str], list[str]]:
    """What each remedy is; and what it adds, costs and fits."""
    names = {"images": "images", "padded text": "padded text", "causal text": "causal", "a cache": "cache"}
    costs = {what: rows_of("bench-remedies") for what in ("training", "inference")}
    rules, facts = [], []
    for row in read(EVIDENCE / "family" / "family.csv"):
        paper = f"[{row['paper']}](https://arxiv.org/abs/{row['paper']})"
        rules.append(line(f"`{row['remedy']}`", f"`{row['class']}`", row["rule"].replace("|", "\\|"), paper))
        added = f"{int(row['parameters in DeiT-Ti']):,}"
        timed = [
            [found for found in rows if found["variant"] == row["remedy"] and f", {what}," in found["table"]]
            for what, rows in costs.items()
        ]
        cost = [with_quartiles(found[0], 2) if found and found[0].get("ratio") else "–" for found in timed]
        fits = [{"yes": "✔", "refused": "✘"}[row[kind]] for kind in (*names, "windows")]
        facts.append(line(f"`{row['remedy']}`", added, row["identity"], *fits, *cost))
    return rules, facts


def effects_table() -> Iterator[str]:
    """What a remedy with default options did to the quality of three trained models, against the control."""
    swept = [Sweep.load(EVIDENCE / "sweep" / f"{name}.json") for name in ("smollm2", "bert_pretrained", "digits")]
    for row in read(EVIDENCE / "family" / "family.csv"):
        cells = []
        for found in swept:
            trials = [t for t in found.trials if t.spec.split(":")[0] == row["remedy"] and "=" not in t.spec]
            change = found.change(max(trials, key=lambda t: t.spec)) if trials else None
            cells.append("–" if change is None else str(change))
        yield line(f"`{row['remedy']}`", *cells)


def exactness() -> list[Row]:
    return read(RESULTS / "orthogonal_precision-cpu-float32-torch2.13.0.csv")


def power(value: float) -> str:
    """As 1.5e-6: the files have more digits and a zero in the exponent; what is not small as 0.13."""
    return f"{value:.2g}" if value > 0.1 else f"{value:.1e}".replace("e-0", "e-")


def exactness_table() -> Iterator[str]:
    states = {
        "qr": ["start", "condition 30", "condition 300"],
        "polar": ["start", "condition 3", "condition 30", "condition 300"],
        "cayley": ["start", "norm 30", "norm 300"],
        "householder": ["start", "condition 300"],
    }
    for basis, names in states.items():
        for name in names:
            row = one(exactness(), variant=basis, state=name)
            shown = "start (condition 37)" if basis == "householder" and name == "start" else name
            if name.startswith("norm"):
                shown = rf"$\Vert S\Vert = {name.removeprefix('norm ')}$"
            errors = (power(float(row[f"{what}_worst"])) for what in ("value", "orthogonality", "gradient"))
            yield line(f"`{basis}`" if name == "start" else "", shown, *errors)


def other_ways_table() -> Iterator[str]:
    """Products and, over all Θ or those it was made for, the worst errors."""
    names = {
        "`polar` as it is": "polar",
        r"$X^\top X$ with a gradient of its own": "polar, XᵀX with its own gradient",
        "gradient by a Sylvester equation, conjugate gradients": "polar, Sylvester by CG",
        "the same equation by Newton–Schulz": "polar, Sylvester by Newton–Schulz",
        "the scaled steps in bfloat16, 3 in float32": "polar, bfloat16 scaled + 3 float32",
        "unscaled steps in bfloat16, 2 in float32": "polar, bfloat16 unscaled + 2 float32",
        "the same, gradient by conjugate gradients": "polar, bfloat16 + 2, Sylvester by CG",
        "`cayley` as it is": "cayley",
        "an LU inverse": "cayley, LU inverse",
        r"$V \leftarrow I - S - VS$": "cayley, fixed point",
        "scalings for each matrix in bfloat16, 4 steps in float32": "cayley, bfloat16 + 4 float32",
    }

    def products(rows: list[Row], direction: str) -> str:
        narrow, library = (rows[0][f"{kind}_{direction}"] for kind in ("bfloat16", "library"))
        if library != "0":
            return f"{library} library call"
        wide = ", ".join(dict.fromkeys(row[f"products_{direction}"] for row in rows))
        return wide if narrow == "0" else f"{narrow} bfloat16 + {wide}"

    for name, variant in names.items():
        rows = [row for row in exactness() if row["variant"] == variant]
        if variant.startswith("cayley, bfloat16"):
            rows = [row for row in rows if row["state"] != "norm 300"]
        worst = (max(float(row[f"{what}_worst"]) for row in rows) for what in ("value", "gradient"))
        errors = ("diverges" if error == float("inf") else power(error) for error in worst)
        yield line(name, products(rows, "forward"), products(rows, "backward"), *errors)


def said_of_costs() -> Iterator[str]:
    for basis, words in {"polar": "", "cayley": ", now by products,", "householder": "", "qr": ""}.items():
        yield f"`{basis}`{words} {with_quartiles(eigen(f'eigen:negative,basis={basis}'))}"


# measure.md

COLUMNS = [  # metric, tap, digits
    ("token_cosine", "block", 3), ("token_cosine", "attention", 3), ("hfc_lfc_spectral", "block", 2),
    ("effective_rank", "block", 0), ("norm_spread", "block", 2), ("attention_entropy", "attention_matrix", 2),
]  # fmt: skip


def profile_table(record: str) -> Iterator[str]:
    profile = Profile.load(EVIDENCE / "real-models" / f"{record}.json")
    values = {(v.metric, v.tap, v.layer): v for v in profile.readings}
    for layer in profile.layers("token_cosine", "block"):
        found = [(values.get((metric, tap, layer)), digits) for metric, tap, digits in COLUMNS]
        cells = ["–" if v is None else f"{v.mean:.{digits}f} ± {v.std:.{digits}f}" for v, digits in found]
        yield line(str(layer), *cells)


# explain.md

PARTS = {"attention": "attention", "rest": "rest of the block"}
LANGUAGE = ("smollm2", "minilm", "bert_pretrained", "bert_ft", "bert_ft_10k_25s")


def language_table(ending: str) -> Iterator[str]:
    """A column for each model. What is by batch is the median batch, then the lowest and the highest."""
    records = [json.loads((EVIDENCE / "language" / f"{name}{ending}.json").read_text("utf-8")) for name in LANGUAGE]
    layers = [record["layers"] for record in records]

    def shown(values: Iterable[float], form: str) -> str:
        middle, *ends = (format(value, form).replace("-", "−") for value in middle_and_range([*values]))
        return f"{middle} ({' to '.join(ends)})"

    def over_batches(found: list[dict[str, list[float]]], key: str, of: Callable[..., float]) -> list[float]:
        return [of(batch) for batch in zip(*(layer[key] for layer in found), strict=True)]

    def percent(key: str) -> Iterator[str]:
        return (shown((100 * share for share in over_batches(found, key, statistics.mean)), ".0f") for found in layers)

    def sides(found: list[dict[str, list[float]]], key: str) -> str:
        low, high = (sum(all(sign * change < 0 for change in layer[key]) for layer in found) for sign in (1, -1))
        return f"{low}, {high}, {len(found) - low - high}"

    def stream(metric: str, digits: int) -> Iterator[str]:
        for curve in (record["stream"][metric] for record in records):
            yield " → ".join(rounded(statistics.median(curve[place]), digits) for place in (0, -1))

    if not ending:  # what does not depend on which tokens count
        shares = [[100 * layer["negative_share"] for layer in found] for found in layers]
        yield line("layers", *(str(len(found)) for found in layers))
        cells = (f"{statistics.mean(share):.0f} ({min(share):.0f} to {max(share):.0f})" for share in shares)
        yield line("Re λ < 0, %: mean layer (lowest to highest)", *cells)
        yield line("μ = 1 dominates, whole H, %", *percent("smoothing"))
        yield line("… head by head, %", *percent("smoothing_by_head"))
        changes = [[statistics.median(layer["attention"]) for layer in found] for found in layers]
        ranks = (
            format(rank_correlation(*pair), "+.2f").replace("-", "−") for pair in zip(shares, changes, strict=True)
        )
        yield line("rank correlation over layers: share of Re λ < 0, change across attention", *ranks)
    yield line("HFC/LFC fell across attention, %", *percent("attention_fell"))
    yield line("… or rose, as the dominating family says, %", *percent("agreement"))
    for key, name in PARTS.items():
        yield line(f"layers whose {name} lowers it, raises it, either", *(sides(found, key) for found in layers))
    for key, name in PARTS.items():
        yield line(
            f"its log change over all layers, {name}", *(shown(over_batches(f, key, sum), "+.2f") for f in layers)
        )
    yield line("HFC/LFC, first → last", *stream("hfc_lfc_spectral", 2))
    yield line("token cosine", *stream("token_cosine", 3))
    yield line("σ₂/σ₁", *stream("singular_ratio", 2))


# Models that were trained, plain and with NeuTRENO

RECIPES = "src/acutance/lab/recipes"
PAIR = {"plain": "plain", "neutreno": "NeuTRENO"}
BATCHES = {"cifar100": "", "cifar100-batch1024": ", 1024"}  # evidence and what its rows are called beside the model


def runs_of(data: str) -> dict[str, Any]:
    return json.loads((EVIDENCE / data / "runs.json").read_text("utf-8"))


def groups(data: str) -> list[dict[str, Any]]:
    """The plain runs of a comparison, then those with NeuTRENO."""
    found = json.loads((EVIDENCE / data / "comparison.json").read_text("utf-8"))["groups"]
    assert [group["label"].startswith("mitigation neutreno") for group in found] == [False, True]
    return found


def with_spread(found: dict[str, float]) -> str:
    return f"{found['mean']:.2f} ± {found['spread']:.2f}"


def cifar100_table(data: str) -> Iterator[str]:
    for (name, label), group in zip(PAIR.items(), groups(data), strict=True):
        rows, kept = times(data, name), runs_of(data)
        yield line(
            label + BATCHES[data],
            with_spread(group),
            f"+{with_spread(group['against_first'])}" if group["against_first"] else "",
            ", ".join(f"{int(row['median_speed']):,}" for row in rows),
            ", ".join(row["seconds"] for row in rows),
            ", ".join(f"{kept[row['run']]['seconds']['step 50']:.1f}" for row in rows),
        )


def scores(*evidence: str) -> Iterator[str]:
    return (with_spread(group) for data in evidence for group in groups(data))


def said_of_cifar100() -> Iterator[str]:
    yield "Expect {} % top-1 on the test set and with NeuTRENO (λ̃ = 0.6) {} %".format(*scores("cifar100"))


def perplexities() -> Iterator[str]:
    return (f"{group['mean']:.2f}" for group in groups("wikitext2"))


def camvid_table() -> Iterator[str]:
    for label, group in zip(("plain", "NeuTRENO, λ̃ = 0.6"), groups("camvid"), strict=True):
        held_out = runs_of("camvid")[Path(group["runs"]["0"]).name]["result"]["scores"]["miou"]
        yield line(label, f"{group['mean']:.2f}", f"{held_out:.2f}")


def changes_of_camvid() -> Iterator[tuple[str, list[str]]]:
    for name, run in runs_of("camvid").items():
        (session,) = run["run"]["sessions"]
        yield name, [f"--set {word}" for word in session["command"] if "=" in word]


def said_of_camvid() -> Iterator[str]:
    yield f"a difference of {groups('camvid')[1]['against_first']['mean']:.2f} points"
    for name, changes in changes_of_camvid():
        yield " ".join(["acutance train camvid --data-dir data --out", f"runs/{name} $WHAT", *changes[4:]])


def said_in_camvids_recipe() -> Iterator[str]:
    yield "test mIoU of {:.2f}, with NeuTRENO (λ̃ = 0.6) {:.2f},".format(*(group["mean"] for group in groups("camvid")))
    for _, changes in changes_of_camvid():
        yield from changes[:2]


def trained_pair_table() -> Iterator[str]:
    profiles = [Profile.load(EVIDENCE / "cifar100" / f"measure-{name}.json") for name in PAIR]
    metrics = {"token_cosine": "token cosine", "hfc_lfc_frobenius": "HFC/LFC (Frobenius)"}
    for metric, label in {**metrics, "rank_residual": "rank residual"}.items():
        for place, tap in {"stream": "block", "attention branch": "attention"}.items():
            by_layer = ({r.layer: r.mean for r in profile.select(metric, tap)} for profile in profiles)
            cells = (", ".join(f"{found[layer]:.3f}" for layer in (1, 6, 12)) for found in by_layer)
            yield line(f"{label}, {place}", *cells)


def said_of_the_last_layer() -> Iterator[str]:
    rows = read(EVIDENCE / "cifar100" / "monitor.csv")
    for name in PAIR:
        row = one(rows, model=name, metric="hfc_lfc_frobenius", layer="12", step="9700")
        yield f"{float(row['mean']):.2f} ± {float(row['std']):.2f}"


def robustness_table() -> Iterator[str]:
    some, many = (
        [RobustnessTable.load(EVIDENCE / "robustness" / f"cifar100-{name}{ending}.json") for name in PAIR]
        for ending in ("", "-h200")
    )
    assert [table.context["images"] for table in some + many] == [1000, 1000, 10_000, 10_000]
    ten = [f"{name}:{level}" for name in list(CORRUPTIONS)[:10] for level in SEVERITIES]
    rows = {
        "1,000 test images, clean": [table["clean"] for table in some],
        "… mean of 19 corruptions at 5 severities": [table.mean() for table in some],
        "… `fgsm:1`": [table["fgsm:1"] for table in some],
        "… `pgd:1`, 20 steps": [table["pgd:1:20:0.125"] for table in some],
        "10,000 test images, clean": [table["clean"] for table in many],
        "… mean of the first 10 corruptions at 5 severities": [
            statistics.mean(table[cell] for cell in ten) for table in many
        ],
    }
    for label, (plain, steered) in rows.items():
        yield line(label, f"{plain:.2f}", f"{steered:.2f}", f"{steered - plain:+.2f}".replace("-", "−"))


# parity.md, from what tests/parity wrote

LIBRARIES = ("acutance.models", "transformers", "torch.nn", "timm", "hand-written")


def parity_cells(*libraries: str) -> list[Row]:
    return [row for library in libraries for row in read(EVIDENCE / "parity" / f"{library}.csv")]


def in_words(rows: list[Row]) -> str:
    """One word, or what re-entrant checkpointing gives beside it."""
    usual, other = (
        "/".join(sorted({row["result"] for row in rows if (row["checkpointing"] == "re-entrant") == which}))
        for which in (False, True)
    )
    return usual if usual == other else f"{usual}, re-entrant {other}"


def parity_table() -> Iterator[str]:
    """A row for each kind of heads and mitigation, a column for each way to run."""
    for library in LIBRARIES:
        groups: dict[tuple[str, str], dict[tuple[str, str], list[Row]]] = {}
        for row in parity_cells(library):
            ways = groups.setdefault((row["heads"], row["mitigation"]), {})
            ways.setdefault((row["run"], row["processes"]), []).append(row)
        for group, ways in groups.items():
            columns = product(("eager", "compile"), ("one process", "DDP", "FSDP2"))
            yield line(library, *group, *(in_words(ways[way]) for way in columns))


def parity_errors_table() -> Iterator[str]:
    """What each precision allows, and what was found in all libraries together."""
    libraries = list(json.loads((EVIDENCE / "parity" / "libraries.json").read_text("utf-8")).values())
    for precision, tolerance in libraries[0]["tolerance"].items():
        errors = [float(row["error"] or 0) for row in parity_cells(*LIBRARIES) if row["precision"] == precision]
        rounding = [library["plain rounding"].get(precision, 0) for library in libraries]
        cuts = [library["smallest cut"][precision] for library in libraries]
        figures = [tolerance, max(errors), max(rounding), min(cuts)]
        yield line(precision, *(f"{figure:.2g}" if figure else "" for figure in figures))


# diagnose.md, from what benchmarks/planting.py wrote


def planting() -> tuple[dict[str, Any], list[Row]]:
    folder = EVIDENCE / "diagnose"
    return json.loads((folder / "planting.json").read_text("utf-8")), read(folder / "planting.csv")


def detector_table() -> Iterator[str]:
    for name, known in DETECTORS.items():
        yield line(name, str(known.tell.__doc__).rstrip("."), f"{known.threshold:g}")


def planted_table() -> Iterator[str]:
    """By fault, of the models that thresholds were not chosen from: found at each dose, and told without the fault."""
    about, rows = planting()
    tried = [row for row in rows if row["half"] == "try"]
    for fault, known in about["faults"].items():
        cells = []
        for dose in known["doses"]:
            found = [row for row in tried if row["fault"] == fault and float(row["dose"]) == dose]
            hits = sum(known["finding"] in row["alarms"].split("; ") for row in found)
            cells.append(f"{hits} of {len(found)} at {dose:g}")
        free = [row for row in tried if not row["fault"] and row["model"] not in known["has"].split()]
        free = [row for row in free if row[f"score: {known['finding']}"] != "nan"]  # patches are not in texts
        alarms = sum(known["finding"] in row["alarms"].split("; ") for row in free)
        yield line(fault, known["finding"], *cells, f"{alarms} of {len(free)}")


def confusion_table() -> Iterator[str]:
    """By fault at its largest dose: in how many of these models each other finding came with it."""
    about, rows = planting()
    tried = [row for row in rows if row["half"] == "try"]
    plain = {row["model"]: set(row["found"].split("; ")) for row in tried if not row["fault"]}
    for fault, known in about["faults"].items():
        found = [row for row in tried if row["fault"] == fault and float(row["dose"]) == known["doses"][-1]]
        told = [
            name for row in found for name in set(row["found"].split("; ")) - plain[row["model"]] - {known["finding"]}
        ]
        others = ", ".join(
            f"{name} {told.count(name)}" for name in sorted(set(told), key=lambda name: (-told.count(name), name))
        )
        yield line(fault, f"{len(found)}", others or "none")


def said_table() -> Iterator[str]:
    trained = json.loads((EVIDENCE / "diagnose" / "cifar100.json").read_text("utf-8"))
    for said in [*planting()[0]["said"], *trained["said"]]:
        findings = "; ".join(f"{found['name']} ({found['severity']})" for found in said["findings"])
        yield line(said["model"], said["data"], said["headline"], findings or "none")


# A page, a heading, which of the tables below it, and what writes its rows.
# sweep.md

SWEPT = {"smollm2": "SmolLM2", "bert_pretrained": "A BERT for chemical reactions", "digits": "A ViT on digits"}


def sweep_table(name: str) -> Iterator[str]:
    for row in Sweep.load(EVIDENCE / "sweep" / f"{name}.json").table().rows:
        remedy, *cells = row.values()
        yield line(f"`{remedy}`" if remedy != "(none)" else remedy, *cells)


def said_of_sweeps() -> Iterator[str]:
    return (Sweep.load(EVIDENCE / "sweep" / f"{name}.json").verdict() for name in SWEPT)


TABLES: list[tuple[str, str, int, Callable[[], Iterable[str]]]] = [
    *(("docs/bench.md", heading, 0, partial(step_table, part)) for part, heading in STEPS.items()),
    ("docs/bench.md", "End to end", 0, end_to_end_table),
    ("docs/bench.md", "The attention by itself", 0, micro_table),
    ("docs/bench.md", "Efficiency as in the paper", 0, efficiency_table),
    ("docs/bench.md", "`Eigen`", 0, eigen_table),
    ("docs/bench.md", "Long sequences", 0, long_training_table),
    ("docs/bench.md", "Measuring", 0, measure_table),
    ("docs/bench.md", "Measuring", 1, busy_host_table),
    ("docs/bench.md", "Many tokens", 0, long_model_table),
    ("docs/operator.md", "Memory", 0, operator_memory_table),
    *(
        ("docs/kernels.md", "Long sequences", n, partial(long_kernel_table, cases))
        for n, cases in enumerate(LONG_CASES)
    ),
    ("docs/kernels.md", "The MLP in one kernel", 0, mlp_table),
    ("docs/kernels.md", "The MLP in one kernel", 1, mlp_tile_table),
    ("docs/measure.md", "Two pretrained models on real text", 0, partial(profile_table, "minilm")),
    ("docs/measure.md", "Two pretrained models on real text", 1, partial(profile_table, "smollm2")),
    ("docs/explain.md", "Pretrained language models", 1, partial(language_table, "")),
    ("docs/explain.md", "Pretrained language models", 2, partial(language_table, "-without-first")),
    ("docs/remedies.md", "The rules", 0, lambda: family_tables()[0]),
    ("docs/remedies.md", "What they add, fit and cost", 0, lambda: family_tables()[1]),
    ("docs/remedies.md", "What they did in three trained models", 0, effects_table),
    ("docs/steer.md", "How exact it is", 0, exactness_table),
    ("docs/steer.md", "How exact it is", 1, other_ways_table),
    ("docs/train.md", "Measured: CIFAR-100", 0, partial(cifar100_table, "cifar100")),
    ("docs/train.md", "Batches of 1024", 0, partial(cifar100_table, "cifar100-batch1024")),
    ("docs/segmentation.md", "Measured: CamVid", 0, camvid_table),
    ("docs/measure.md", "A trained pair", 0, trained_pair_table),
    ("docs/robustness.md", "Measured: a trained pair", 0, robustness_table),
    *(("docs/sweep.md", heading, 0, partial(sweep_table, name)) for name, heading in SWEPT.items()),
    ("docs/diagnose.md", "How to read a finding", 0, detector_table),
    ("docs/diagnose.md", "Planted faults", 0, planted_table),
    ("docs/diagnose.md", "Planted faults", 1, confusion_table),
    ("docs/diagnose.md", "What it says of real models", 0, said_table),
    ("docs/parity.md", "The table", 0, parity_table),
    ("docs/parity.md", "How small a mistake would be seen?", 0, parity_errors_table),
]
SENTENCES: list[tuple[str, Callable[[], Iterable[str]]]] = [
    ("docs/bench.md", said_of_steps),
    ("docs/bench.md", said_of_other_tables),
    ("docs/kernels.md", said_of_kernels),
    ("docs/steer.md", said_of_costs),
    ("docs/log.md", partial(scores, *BATCHES)),
    ("docs/bench.md", partial(scores, "cifar100-batch1024")),
    (f"{RECIPES}/small_images.py", said_of_cifar100),
    *((page, perplexities) for page in (f"{RECIPES}/language.py", "docs/language.md")),
    ("docs/segmentation.md", said_of_camvid),
    (f"{RECIPES}/segmentation.py", said_in_camvids_recipe),
    ("docs/monitor.md", said_of_the_last_layer),
    ("docs/sweep.md", said_of_sweeps),
]


def main() -> None:
    for page, heading, place, expected in TABLES:
        (ROOT / page).write_text(updated(page, heading, place, expected()), encoding="utf-8")
    left = [f"{page}: {sentence}" for page, told in SENTENCES for sentence in missing(page, told())]
    sys.exit("\n".join(["these pages should say:", *left]) if left else 0)


if __name__ == "__main__":
    main()
