"""What docs/kernels.md publishes is what its files hold."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from published import (
    Row,
    assert_said,
    assert_table,
    line,
    one,
    rounded,
    rows_of,
    step,
    with_quartiles,
)

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


def said_of_mlp_tiles() -> Iterator[str]:
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


def said_of_shared_keys() -> Iterator[str]:
    parts, names = ("forward", "backward"), ("ours", "SDPA cudnn + correction")
    pairs = (long_kernel(part, name, kv_heads="4") for part in parts for name in names)
    yield "ours took {} ms forwards and cuDNN's with the correction {}, backwards {} and {}".format(*pairs)


def said_of_the_mlps_memory() -> Iterator[str]:
    memory = rounded(step("steps-224", "training", "NeuTRENO", "default")["memory_ratio"], 2)
    yield f"[{memory}](bench.md#deit-ti16-at-224224) of the memory of a training step"


def said_of_the_order() -> Iterator[str]:
    """Two tiles forwards, each once the first of ours and once not."""
    own, other = ("ours 64 64 4 3 128", "ours 128 64 8 3 128")

    def ms(ending: str, variant: str) -> list[str]:
        rows = rows_of("long_kernels", ending)
        found = (one(rows, part="forward", tokens=n, **LONG_HEADS, variant=variant) for n in ("2048", "8192"))
        return [rounded(row["ms"], 3) for row in found]

    yield "had {} and {} ms forwards for the same tile".format(*ms("-other-order", own))
    yield "for the one that came first there {} and {}".format(*ms("-other-order", other))
    yield "this run has {} and {} for it".format(*ms("", other))


@pytest.mark.parametrize(
    ("heading", "place", "expected"),
    [
        *(("Long sequences", place, partial(long_kernel_table, cases)) for place, cases in enumerate(LONG_CASES)),
        ("The MLP in one kernel", 0, mlp_table),
        ("The MLP in one kernel", 1, mlp_tile_table),
    ],
)
def test_a_table_of_the_kernels_is_its_file(heading: str, place: int, expected: Callable[[], Iterator[str]]) -> None:
    assert_table("docs/kernels.md", heading, place, expected())


@pytest.mark.parametrize("told", [said_of_mlp_tiles, said_of_shared_keys, said_of_the_order, said_of_the_mlps_memory])
def test_what_is_said_beside_the_tables_of_the_kernels(told: Callable[[], Iterator[str]]) -> None:
    assert_said("docs/kernels.md", told())
