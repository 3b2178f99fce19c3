"""What docs/bench.md publishes is what its files hold."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from published import (
    ATTENTION,
    DEIT,
    LLAMA,
    MANY,
    MATRICES,
    OURS,
    SMALL,
    STEPS,
    TOKENS,
    Row,
    assert_said,
    assert_table,
    line,
    measured,
    one,
    rounded,
    rows_of,
    step,
    trained,
    with_quartiles,
)


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
        ("forward", "SDPA, plain"): "SDPA without the term",
        ("forward", "fused kernel, with the term"): "ours with the term",
        ("forward and backward", "SDPA, plain"): "SDPA without the term",
        ("forward and backward", "SDPA, with the term"): "SDPA and the term",
        ("forward and backward", "fused kernel, plain"): "ours without",
        ("forward and backward", "fused kernel, with the term"): "ours with the term",
    }
    for (what, variant), name in names.items():
        cells = []
        for size in ("1024, 64", "1024, 65", "512, 197"):
            row = one(rows, table=f"batch {size} tokens, 3 heads of width 64, {what}", variant=variant)
            cells.append(f"{rounded(1e3 * float(row['ms']), 0)} ({rounded(row['times_floor'], 1)})")
        yield line(f"{what}, {name}", *cells)


def efficiency_table() -> Iterator[str]:
    rows = rows_of("bench-efficiency")
    for mode in ("fused kernel", "SDPA"):
        row = one(rows, variant="NeuTRENO", mode=mode)
        yield line(mode, *(rounded(row[name], 4) for name in ("flops_ratio", "memory_ratio")), with_quartiles(row, 4))


def eigen_table() -> Iterator[str]:
    for basis in ("polar", "cayley", "householder", "qr"):
        row = one(rows_of("bench-eigen"), variant=f"eigen:negative,basis={basis}")
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
    rows = rows_of("bench-measure")
    names = {
        "Llama, 1.2 billion parameters, 4 × 2048 tokens": LLAMA,
        "timm's DeiT-Ti, 256 images": DEIT,
        "timm's DeiT-Ti, 1024 images": MANY,
        "our DeiT-Ti, 256 images": OURS,
    }
    for name, model in names.items():
        plain, tokens, attention, matrices = (
            one(rows, table=f"measuring {model}", variant=variant)
            for variant in ("plain forward pass", TOKENS, ATTENTION, MATRICES)
        )
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
        rows = rows_of("bench-measure", ending)
        pairs = [
            one(rows, table=f"measuring {model}", variant=variant)
            for model in (DEIT, MANY, LLAMA)
            for variant in (TOKENS, ATTENTION)
        ]
        smallest = "" if "quick" in machine else f", smallest {rounded(pairs[0]['ratio_min'], 3)}"
        others = [rounded(row["ratio"], 3) for row in pairs[1:]]
        yield line(machine, with_quartiles(pairs[0]) + smallest, *others)


def long_model_table() -> Iterator[str]:
    rows = rows_of("bench-long-model")
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        plain, read, matrices = (
            one(rows, tokens=tokens, variant=variant)
            for variant in ("plain forward pass", "measure", "by whole matrices")
        )
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
    yield f"batch 1024, {rounded(one(rows_of('bench-eigen'), variant='plain ViT')['ms'], 2)} ms), both in CUDA graphs"
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


def said_of_many_tokens() -> Iterator[str]:
    names = ("nonlocal_energy", "attention_entropy", "extreme_eigenvalues", "log_nonlocal_energy_raw")
    energy, entropy, extreme, raw = (one(rows_of("bench-long-tokens"), tokens="32768", variant=name) for name in names)
    ratios = rounded(energy["ratio"], 1), rounded(entropy["ratio"], 2)
    yield "energy takes {} times as long as A v, entropy {} times".format(*ratios)
    yield f"the extreme eigenvalues {rounded(float(extreme['ms']) / 1e3, 1)} s and"
    yield f"pair by pair, {rounded(float(raw['ms']) / 1e3, 0)} s."


def said_of_trainings_in_the_bench() -> Iterator[str]:
    (steered, faster), (plain, fastest) = (trained("cifar100-batch1024", label) for label in ("neutreno", "plain"))
    yield f"see {fastest:,} and, with NeuTRENO, {faster:,} images/s"
    yield f"they take {min(steered + plain)} to {sorted(steered + plain)[-2]} s once compiled"


@pytest.mark.parametrize(
    ("heading", "place", "expected"),
    [
        *((heading, 0, partial(step_table, part)) for part, heading in STEPS.items()),
        ("End to end", 0, end_to_end_table),
        ("The attention by itself", 0, micro_table),
        ("Efficiency as in the paper", 0, efficiency_table),
        ("`Eigen`", 0, eigen_table),
        ("Long sequences", 0, long_training_table),
        ("Measuring", 0, measure_table),
        ("Measuring", 1, busy_host_table),
        ("Many tokens", 0, long_model_table),
    ],
)
def test_a_table_of_the_bench_is_its_file(heading: str, place: int, expected: Callable[[], Iterator[str]]) -> None:
    assert_table("docs/bench.md", heading, place, expected())


@pytest.mark.parametrize(
    "told", [said_of_steps, said_of_other_tables, said_of_many_tokens, said_of_trainings_in_the_bench]
)
def test_what_is_said_beside_the_tables_of_the_bench(told: Callable[[], Iterator[str]]) -> None:
    assert_said("docs/bench.md", told())
