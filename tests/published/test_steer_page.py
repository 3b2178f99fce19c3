"""What docs/steer.md publishes of exactness and speed is what its files hold."""

from collections.abc import Callable, Iterator

import pytest

from published import (
    RESULTS,
    Row,
    assert_said,
    assert_table,
    line,
    one,
    read,
    rows_of,
    with_quartiles,
)


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
    told = ("`polar` {}", "`cayley`, now by products, {}", "`householder` {}", "`qr` {}")
    for basis, words in zip(("polar", "cayley", "householder", "qr"), told, strict=True):
        yield words.format(with_quartiles(one(rows_of("bench-eigen"), variant=f"eigen:negative,basis={basis}")))


@pytest.mark.parametrize(("place", "expected"), [(0, exactness_table), (1, other_ways_table)])
def test_a_table_of_exactness_is_its_file(place: int, expected: Callable[[], Iterator[str]]) -> None:
    assert_table("docs/steer.md", "How exact it is", place, expected())


def test_what_is_said_of_costs_is_in_the_file() -> None:
    assert_said("docs/steer.md", said_of_costs())
