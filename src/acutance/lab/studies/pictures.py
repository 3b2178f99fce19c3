"""The pictures of all studies, drawn with matplotlib, and their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acutance.files.atomic import atomic_write
from acutance.lab.files import finite
from acutance.report.page import PALETTE
from acutance.report.pictures import blank_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from acutance.lab.studies.repeat import Trajectory

# Each definition as a value that falls to 0 when it is met. Below the floor there is only rounding.
FALLING: Mapping[str, Callable[[Trajectory], NDArray[np.float64]]] = {
    "input: ‖HFC‖/‖LFC‖": lambda t: t.hfc_lfc,
    "angle: 1 − min cosine": lambda t: 1 - t.min_cosine,
    "rank: σ₂/σ₁": lambda t: t.singular_ratio,
}
FLOOR = 1e-6
# The metric and its axis.
DEPTH_PANELS = {
    "input: ‖HFC‖/‖LFC‖": ("hfc_lfc_spectral", "log"),
    "angle: mean token cosine": ("token_cosine", "linear"),
    "rank: σ₂/σ₁": ("singular_ratio", "linear"),
}
# The titles of panels, and columns of `KernelStudy.to_frame`.
KERNEL_PANELS = {
    "alignment (Table 4)": "alignment",
    "asymmetry of exp(q·k/√d)": "kernel_asymmetry",
    "negative share of its spectrum": "kernel_negative",
    "rank correlation of asymmetry\nand alignment within the layer": "correlation_kernel_asymmetry",
}
DATA = {"train": "training images", "test": "test images"}
INITS = {"deit": "weights with σ = 0.02 (DeiT)", "xavier": "weights by Xavier"}


def repeat_picture(
    trajectories: Mapping[str, Mapping[str, Trajectory]], definitions: Sequence[str] = tuple(FALLING)
) -> Figure:
    """A column per setting (outer names), a row per definition, a curve per inner name: mean and range over samples."""
    figure, axes = blank_figure(len(definitions), len(trajectories), width=2.7, height=2.2)
    for row, definition in zip(axes, definitions, strict=True):
        for axis, curves in zip(row, trajectories.values(), strict=True):
            for (name, trajectory), colour in zip(curves.items(), PALETTE, strict=False):
                values = np.clip(FALLING[definition](trajectory), FLOOR, None)
                middle = np.exp(np.log(values).mean(0))
                axis.plot(middle, color=colour, label=name)
                if len(values) > 1:
                    depth = range(values.shape[1])
                    axis.fill_between(depth, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
            axis.set(yscale="log", ylim=(FLOOR, 1e2), yticks=[1e-6, 1e-3, 1])
            axis.minorticks_off()
            axis.locator_params(axis="x", nbins=4, integer=True)
            axis.grid(axis="y", alpha=0.3)
            axis.tick_params(labelbottom=axis in axes[-1], labelleft=axis is row[0])
        row[0].set_ylabel(definition)
    for axis, setting in zip(axes[0], trajectories, strict=True):
        axis.set_title(setting, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("layers")
    if names := [name for name in next(iter(trajectories.values())) if name]:
        _legend(figure, axes[0][0], columns=len(names))
    return figure


def depth_picture(
    frame: pd.DataFrame, depths: Sequence[int], definitions: Sequence[str] = tuple(DEPTH_PANELS)
) -> Figure:
    """A picture of `DepthStudy.to_frame`: a row per initialisation, a column per definition, a curve per variant."""
    inits, variants = frame["init"].unique(), frame["variant"].unique()
    shape = len(inits), len(definitions)
    figure, axes = blank_figure(*(shape if shape[1] > 1 else shape[::-1]), width=3.4, height=2.6)
    axes = axes.reshape(shape)  # a single definition has its initialisations side by side
    for row, init in zip(axes, inits, strict=True):
        for axis, title in zip(row, definitions, strict=True):
            metric, scale = DEPTH_PANELS[title]
            for variant, colour in zip(variants, PALETTE, strict=False):
                chosen = frame[(frame["init"] == init) & (frame["variant"] == variant)].set_index("layer")
                floor = FLOOR / 10 if scale == "log" else -np.inf  # a cosine may be negative
                spread_curve(axis, chosen[metric], "layer", colour, "-", variant, floor)
            axis.set(yscale=scale, xticks=[0, *sorted(depths)])
            axis.set_title(f"{title}\n{INITS.get(init, init)}", fontsize=9)
            axis.minorticks_off()
            axis.grid(axis="y", alpha=0.3)
    for axis in axes[-1] if shape[1] > 1 else axes[:, 0]:
        axis.set_xlabel("layer")
    _legend(figure, axes[0][0], columns=6 if shape[1] > 2 else 3)
    return figure


def kernel_picture(frame: pd.DataFrame) -> Figure:
    """A picture of `KernelStudy.to_frame`: a panel per measure by layer, a curve per variant.

    Curves of training images are dashed, those of permuted entries dotted.
    """
    figure, axes = blank_figure(1, len(KERNEL_PANELS), width=3.0, height=2.8)
    variants = frame["variant"].unique()
    for axis, (title, column) in zip(axes[0], KERNEL_PANELS.items(), strict=True):
        for variant, colour in zip(variants, cycle(PALETTE), strict=False):
            for data in sorted(frame["data"].unique()):  # test before train
                chosen = frame[(frame["variant"] == variant) & (frame["data"] == data)].groupby(["layer", "run"])
                label, style = f"{variant}, {DATA.get(data, data)}", "--" if data == "train" else "-"
                spread_curve(axis, chosen[column].mean(), "layer", colour, style, label)
            if (chance := f"{column}_permuted") in frame:
                axis.plot(chosen[chance].mean().groupby("layer").mean(), ":", color=colour, linewidth=1)
        axis.set(xlabel="layer")
        axis.set_title(title, fontsize=9)
        axis.locator_params(axis="x", integer=True)
        axis.grid(alpha=0.3)
    _legend(figure, axes[0][0], columns=4)
    return figure


def spread_curve(
    axis: Axes, values: pd.Series[float], over: str, colour: str, style: str, label: str, floor: float = -np.inf
) -> None:
    """Mean and spread over runs of values grouped by (over, run). A variant without numbers draws nothing."""
    by = values.groupby(over).agg(["mean", "std"])
    mean, spread = by["mean"].clip(lower=floor), by["std"].fillna(0)
    axis.plot(by.index, mean, style, color=colour, label=label, linewidth=1.3)
    low = (mean - spread).clip(lower=floor)
    axis.fill_between(by.index, low, mean + spread, color=colour, alpha=0.15, linewidth=0)


def _legend(figure: Figure, axis: Axes, columns: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=8)


def save_study(
    folder: str | os.PathLike[str], name: str, frame: pd.DataFrame, body: Mapping[str, Any], figure: Figure
) -> list[Path]:
    """Write name.csv, name.json, name.png and name.svg."""
    stem, text = Path(folder) / name, json.dumps(finite(body), indent=1, ensure_ascii=False)
    return [
        atomic_write(stem.with_suffix(".csv"), frame.to_csv(index=False, float_format="%.5g").encode()),
        atomic_write(stem.with_suffix(".json"), text.encode()),
        *save_picture(figure, stem),
    ]


def save_picture(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.png and stem.svg. The SVG has no date, so the same numbers give the same file."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "acutance"}):
        png = atomic_write(stem.with_suffix(".png"), partial(figure.savefig, dpi=150, facecolor="white"))
        writer = partial(figure.savefig, facecolor="white", metadata={"Date": None})
        return [png, atomic_write(stem.with_suffix(".svg"), writer)]
