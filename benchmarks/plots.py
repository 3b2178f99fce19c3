"""Draws the results of `acutance bench`.

    python benchmarks/plots.py steps benchmarks/results/bench-steps-32-*.csv docs/assets/bench/steps-32.svg
    python benchmarks/plots.py tokens benchmarks/results/bench-long-tokens-*.csv docs/assets/bench/long-tokens.svg
    python benchmarks/plots.py overview benchmarks/results docs/assets/bench/overview.svg

`steps`: ratios to timm's plain ViT, with their range. `tokens`: time and peak memory against tokens. `overview`: one
line per important figure, from all files of a folder, with quartiles and the ratio we aimed at.
"""

import csv
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figure_of(height: float) -> Figure:
    mpl.rcParams["svg.hashsalt"] = "acutance"
    return Figure(figsize=(9, height), layout="constrained")


def steps(source: Path) -> Figure:
    """One bar per variant in its fastest mode, with a panel for training and one for inference."""
    rows = [row for row in read(source) if row["mode"] == "reduce-overhead"]
    tables = list(dict.fromkeys(row["table"] for row in rows))
    figure = figure_of(2.8)
    for axis, table in zip(figure.subplots(1, len(tables), sharey=True), tables, strict=True):
        found = [row for row in rows if row["table"] == table][::-1]
        names = [row["variant"].replace(", ", ",\n", 1) for row in found]
        ratios = [float(row["ratio"]) for row in found]
        spread = [[abs(float(row[f"ratio_{end}"]) - float(row["ratio"])) for row in found] for end in ("min", "max")]
        ours = ["NeuTRENO" in name for name in names]
        axis.barh(names, ratios, xerr=spread, color=[("#b0b7c3", "#3b6ea5")[each] for each in ours], capsize=2)
        axis.axvline(1, color="black", linewidth=0.8)
        for place, ratio in enumerate(ratios):
            axis.text(0.02, place, f"{ratio:.3f}", va="center", color="white" if ours[place] else "black")
        axis.set_title(table, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    words = f"÷ timm's plain ViT, {rows[0]['device']}; bars: median, whiskers: smallest and largest"
    figure.supxlabel(words, fontsize=8)
    return figure


def tokens(source: Path) -> Figure:
    """A line per variant on logarithmic axes. Bands show the smallest and largest times."""
    rows = [row for row in read(source) if row["ms"]]
    figure = figure_of(3.6)
    # A column, its name, and the exponent of the dashed line; work grows with all pairs of tokens.
    panels = (("ms", "ms", 2), ("peak_mib", "peak MiB above what is resident", 1))
    for axis, (column, name, power) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        growing(axis, [row for row in rows if float(row.get(column) or 0) > 0], column, power)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7, frameon=False)
    figure.suptitle(f"{rows[0]['table']}, {rows[0]['device']}; dashed: ∝ tokens², ∝ tokens", fontsize=9)
    return figure


def growing(axis: Axes, rows: list[Row], column: str, power: int) -> None:
    for variant in dict.fromkeys(row["variant"] for row in rows):
        found = [row for row in rows if row["variant"] == variant]
        lengths, values = [int(row["tokens"]) for row in found], [float(row[column]) for row in found]
        (line,) = axis.plot(lengths, values, marker="o", markersize=3, linewidth=1.2, label=variant)
        if column == "ms":
            low, high = ([float(row[f"ms_{end}"]) for row in found] for end in ("min", "max"))
            axis.fill_between(lengths, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if axis.lines:  # from the first point of the first line
        lengths, values = (list(data) for data in axis.lines[0].get_data())
        grown = [values[0] * (count / lengths[0]) ** power for count in lengths]
        axis.plot(lengths, grown, color="grey", linestyle="--", linewidth=0.8)


class Line(NamedTuple):
    """A row of a file of `acutance bench`: a part of its table's title, its variant, and the ratio we aimed at."""

    label: str
    part: str
    table: str
    variant: str
    aim: float


GREY, BLUE, COLOURS = "#666666", "#0072B2", {"eigen": "#009E73", "measure": "#D55E00"}
FUSED, READ, ENERGY = "NeuTRENO, fused kernel", "token metrics", "and attention energy and entropy"
TIMM = "timm's DeiT-Ti/16, 224×224, batch 256"
LINES = (
    Line("NeuTRENO, ViT-Ti/4, 32×32, training ÷ timm's plain ViT", "steps-32", "training", "NeuTRENO", 1.0),
    Line("NeuTRENO, ViT-Ti/4, 32×32, inference ÷ timm's plain ViT", "steps-32", "inference", "NeuTRENO", 1.0),
    Line("NeuTRENO, DeiT-Ti/16, 224×224, training ÷ timm's plain ViT", "steps-224", "training", "NeuTRENO", 1.0),
    Line("NeuTRENO, DeiT-Ti/16, 224×224, inference ÷ timm's plain ViT", "steps-224", "inference", "NeuTRENO", 1.0),
    Line("NeuTRENO, 2048 tokens, training ÷ plain, SDPA flash", "long-training", " 2048 tokens", FUSED, 1.01),
    Line("NeuTRENO, 8192 tokens, training ÷ plain, SDPA flash", "long-training", " 8192 tokens", FUSED, 1.01),
    *(
        Line(f"negative spectrum, {basis}, training ÷ plain ViT", "eigen", "", f"eigen:negative,basis={basis}", 1.05)
        for basis in ("polar", "cayley", "householder")
    ),
    Line("measuring timm's DeiT-Ti, token metrics ÷ forward pass", "measure", TIMM, READ, 1.1),
    Line("measuring a Llama, token metrics ÷ forward pass", "measure", "measuring Llama", READ, 1.1),
    Line("measuring timm's DeiT-Ti, and energy, entropy ÷ forward pass", "measure", TIMM, ENERGY, 1.6),
    Line("measuring a Llama, and energy, entropy ÷ forward pass", "measure", "measuring Llama", ENERGY, 1.6),
)


def overview(results: Path) -> Figure:
    """A point for each median, whiskers for its quartiles, and a thick tick for the ratio we aimed at."""
    figure = figure_of(4.2)
    axis: Any = figure.subplots()
    for place, line in enumerate(LINES):
        row, colour = row_of(results, line), COLOURS.get(line.part, BLUE)
        # Older files keep the ratio to SDPA's flash attention in separate columns.
        name = "beside_ratio" if row.get("beside_ratio") else "ratio"
        middle, low, high = (float(row[f"{name}{end}"]) for end in ("", "_q1", "_q3"))
        axis.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color=colour, capsize=3, elinewidth=1.2)
        axis.plot(middle, place, "o", markersize=4, color=colour)
        axis.plot(line.aim, place, "|", color=GREY, markersize=12, markeredgewidth=2)
        beside = axis.get_yaxis_transform()  # right of the drawing, at the height of the point
        axis.text(1.02, place, f"{middle:.3f}", ha="left", va="center", fontsize=8, transform=beside)
    axis.axvline(1, color="black", linewidth=0.9, zorder=1)
    axis.set_yticks(range(len(LINES)), [line.label for line in LINES])
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    figure.supxlabel(
        f"ratio of times, {row['device']}: median and quartiles, most of which are hidden by the point;\n"
        "grey tick: what was aimed at",
        fontsize=8,
    )
    return figure


def row_of(results: Path, line: Line) -> Row:
    """The row from the file without a label after its versions; of several modes, the one with CUDA graphs."""
    path = min(results.glob(f"bench-{line.part}-*.csv"), key=lambda path: len(path.name))
    found = [row for row in read(path) if line.table in row["table"] and row["variant"] == line.variant]
    (row,) = [row for row in found if len(found) == 1 or row["mode"] == "reduce-overhead"]
    return row


if __name__ == "__main__":
    drawn = {"steps": steps, "tokens": tokens, "overview": overview}[sys.argv[1]](Path(sys.argv[2]))
    Path(sys.argv[3]).parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(sys.argv[3], facecolor="white", metadata={"Date": None})
