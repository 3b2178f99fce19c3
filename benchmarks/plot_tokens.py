"""Draws what `acutance bench --only long-tokens` or long-model found: time and peak memory against tokens.

python benchmarks/plot_tokens.py benchmarks/results/bench-long-tokens-*.csv docs/assets/bench/long-tokens.svg
"""

import csv
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# A column, its name, and the growth that stands beside it as a dashed line: the work is of all pairs of tokens.
PANELS = (("ms", "ms", 2), ("peak_mib", "peak MiB above what is resident", 1))


def main(source: Path, target: Path) -> None:
    """A line per variant, both axes logarithmic; around times the smallest and the largest."""
    with source.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ms"]]
    mpl.rcParams["svg.hashsalt"] = "acutance"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, (column, name, power) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        draw(axis, [row for row in rows if float(row.get(column) or 0) > 0], column)
        growth(axis, power)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7, frameon=False)
    figure.suptitle(f"{rows[0]['table']}, {rows[0]['device']}; dashed: ∝ tokens², ∝ tokens", fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def draw(axis: Axes, rows: list[dict[str, str]], column: str) -> None:
    for variant in dict.fromkeys(row["variant"] for row in rows):
        found = [row for row in rows if row["variant"] == variant]
        tokens = [int(row["tokens"]) for row in found]
        values = [float(row[column]) for row in found]
        (line,) = axis.plot(tokens, values, marker="o", markersize=3, linewidth=1.2, label=variant)
        if column == "ms":
            low, high = ([float(row[f"ms_{end}"]) for row in found] for end in ("min", "max"))
            axis.fill_between(tokens, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def growth(axis: Axes, power: int) -> None:
    """From the first point of the first line on."""
    if axis.lines:
        tokens, values = (list(data) for data in axis.lines[0].get_data())
        grown = [values[0] * (count / tokens[0]) ** power for count in tokens]
        axis.plot(tokens, grown, color="grey", linestyle="--", linewidth=0.8)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
