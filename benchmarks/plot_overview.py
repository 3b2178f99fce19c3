"""Draws one line per figure that matters: ratios of `acutance bench` on one GPU, with quartiles and what was aimed at.

python benchmarks/plot_overview.py benchmarks/results docs/assets/bench/overview.svg
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"NeuTRENO": "#0072B2", "spectra": "#009E73", "measure": "#D55E00"}
GREY = "#666666"
AS_FAST = 1.0


@dataclass(frozen=True)
class Line:
    """A row of one file of `acutance bench`.

    Attributes:
        label: names what it is divided by, too.
        kind: gives the colour.
        part: of the bench, as in the file's name.
        wanted: columns and what stands in them, of a table's title a piece.
        aim: the ratio it was to stay below.
        ratio: its column; `beside_ratio` is to another one than the baseline.
    """

    label: str
    kind: str
    part: str
    wanted: dict[str, str]
    aim: float
    ratio: str = "ratio"


def steps(part: str, model: str, what: str) -> Line:
    wanted = {"table": what, "variant": "NeuTRENO", "mode": "reduce-overhead"}
    return Line(f"NeuTRENO, {model}, {what} ÷ timm's plain ViT", "NeuTRENO", part, wanted, AS_FAST)


def language(tokens: int) -> Line:
    wanted = {"table": f" {tokens} tokens", "variant": "NeuTRENO, fused kernel"}
    label = f"NeuTRENO, {tokens} tokens, training ÷ plain, SDPA flash"
    return Line(label, "NeuTRENO", "long-training", wanted, 1.01, "beside_ratio")


def spectrum(basis: str) -> Line:
    wanted = {"variant": f"eigen:negative,basis={basis}"}
    return Line(f"negative spectrum, {basis}, training ÷ plain ViT", "spectra", "eigen", wanted, 1.05)


def reading(label: str, table: str, what: str, aim: float) -> Line:
    names = {"token metrics": "token metrics", "and energy, entropy": "and attention energy and entropy"}
    return Line(
        f"measuring {label}, {what} ÷ forward pass", "measure", "measure", {"table": table, "variant": names[what]}, aim
    )


LLAMA, DEIT = ("a Llama", "measuring Llama"), ("timm's DeiT-Ti", "measuring timm's DeiT-Ti/16, 224×224, batch 256")
LINES = (
    *(steps("steps-32", "ViT-Ti/4, 32×32", what) for what in ("training", "inference")),
    *(steps("steps-224", "DeiT-Ti/16, 224×224", what) for what in ("training", "inference")),
    *(language(tokens) for tokens in (2048, 8192)),
    *(spectrum(basis) for basis in ("polar", "cayley", "householder")),
    *(
        reading(*model, what, aim)
        for what, aim in (("token metrics", 1.10), ("and energy, entropy", 1.6))
        for model in (DEIT, LLAMA)
    ),
)


def main(results: Path, target: Path) -> None:
    """A point for each median, whiskers for its quartiles, a thick tick for what was aimed at."""
    mpl.rcParams["svg.hashsalt"] = "acutance"
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axis = figure.subplots()
    for place, line in enumerate(LINES):
        draw(axis, place, line, found(results, line))
    axis.axvline(1, color="black", linewidth=0.9, zorder=1)
    axis.set_yticks(range(len(LINES)), [line.label for line in LINES])
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    figure.supxlabel(
        f"ratio of times, {device(results)}: median and quartiles, most of which are hidden by the point;\n"
        "grey tick: what was aimed at",
        fontsize=8,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, facecolor="white", metadata={"Date": None})


def rows_of(results: Path, part: str) -> list[dict[str, str]]:
    """Of the one file without a label behind its versions."""
    paths = sorted(results.glob(f"bench-{part}-*.csv"), key=lambda path: len(path.name))
    with paths[0].open(newline="") as file:
        return list(csv.DictReader(file))


def device(results: Path) -> str:
    return rows_of(results, LINES[0].part)[0]["device"]


def found(results: Path, line: Line) -> tuple[float, float, float]:
    """Median and quartiles of the ratio."""
    rows = rows_of(results, line.part)
    (row,) = [row for row in rows if all(matches(name, row[name], piece) for name, piece in line.wanted.items())]
    middle, low, high = (float(row[f"{line.ratio}{end}"]) for end in ("", "_q1", "_q3"))
    return middle, low, high


def matches(column: str, text: str, piece: str) -> bool:
    """A title contains what is asked for, all else is it."""
    return piece in text if column == "table" else piece == text


def draw(axis: Axes, place: int, line: Line, ratio: tuple[float, float, float]) -> None:
    middle, low, high = ratio
    colour = COLOURS[line.kind]
    axis.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color=colour, capsize=3, elinewidth=1.2)
    axis.plot(middle, place, "o", markersize=4, color=colour)
    axis.plot(line.aim, place, "|", color=GREY, markersize=12, markeredgewidth=2)
    beside = axis.get_yaxis_transform()  # right of the drawing, at the height of the point
    axis.text(1.02, place, f"{middle:.3f}", ha="left", va="center", fontsize=8, transform=beside)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
