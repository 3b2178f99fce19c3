"""Draws what `acutance bench --only steps-32` or steps-224 found: ratios to timm's plain ViT, with their range.

python benchmarks/plot_steps.py benchmarks/results/bench-steps-32-*.csv docs/assets/bench/steps-32.svg
"""

import csv
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

COLOURS = ("#b0b7c3", "#3b6ea5")


def main(source: Path, target: Path) -> None:
    """One bar per variant in its fastest mode; training beside inference."""
    with source.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "reduce-overhead"]
    tables = list(dict.fromkeys(row["table"] for row in rows))
    mpl.rcParams["svg.hashsalt"] = "acutance"
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axis, table in zip(figure.subplots(1, len(tables), sharey=True), tables, strict=True):
        found = [row for row in rows if row["table"] == table][::-1]
        ratios = [float(row["ratio"]) for row in found]
        low, high = ([float(row[f"ratio_{end}"]) for row in found] for end in ("min", "max"))
        spread = [
            [r - lo for r, lo in zip(ratios, low, strict=True)],
            [hi - r for r, hi in zip(ratios, high, strict=True)],
        ]
        names = [row["variant"].replace(", ", ",\n", 1) for row in found]
        axis.barh(names, ratios, xerr=spread, color=[COLOURS["NeuTRENO" in name] for name in names], capsize=2)
        axis.axvline(1, color="black", linewidth=0.8)
        for place, ratio in enumerate(ratios):
            axis.text(
                0.02, place, f"{ratio:.3f}", va="center", color="white" if "NeuTRENO" in names[place] else "black"
            )
        axis.set_title(table, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"÷ timm's plain ViT, {rows[0]['device']}; bars: median, whiskers: smallest and largest", fontsize=8
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
