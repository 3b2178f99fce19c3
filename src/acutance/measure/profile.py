"""Profile: what was measured, layer by layer, and where it was read."""

import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from acutance.measure.headline import headline_of, higher_is, main_curve
from acutance.report.page import write_page
from acutance.report.pictures import Figure, plot_curves
from acutance.report.tables import FittedTable, Result, short, to_plain

if TYPE_CHECKING:
    from acutance.measure.comparison import Comparison

MATRIX = "attention_matrix"  # the tap of metrics that are read from the attention operator rather than from tokens
ARROWS = {"smoother": " ↑", "sharper": " ↓"}  # which way is smoother


@dataclass(frozen=True)
class MetricValue:
    """One metric at one layer, averaged over the samples."""

    tap: str  # where the tokens were read: block, attention, values, final; or attention_matrix
    layer: int  # 1 is the first block; 0 is what enters it
    metric: str
    mean: float
    std: float  # over samples
    count: int  # samples
    # Of each sample in float32, in the order read; None where there were too many to keep.
    values: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    def row(self) -> dict[str, Any]:
        """All but the values."""
        return {name: getattr(self, name) for name in ("tap", "layer", "metric", "mean", "std", "count")}


@dataclass(frozen=True)
class Profile(Result):
    """Metrics by layer, with the context that makes them reproducible.

    `profile["token_cosine"]` is the metric's mean by depth; `profile["token_cosine", "attention"]` names the tap,
    which is needed only if the metric was read at several.
    """

    FORMAT = "acutance-profile/1"
    readings: tuple[MetricValue, ...]
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> list[str]:
        """The metrics read, in the order they were asked for."""
        return list(dict.fromkeys(r.metric for r in self.readings))

    @property
    def taps(self) -> list[str]:
        """The places that were read."""
        return list(dict.fromkeys(r.tap for r in self.readings))

    def select(self, metric: str, tap: str | None = None) -> list[MetricValue]:
        """The readings of one metric at one tap, by depth."""
        found = [r for r in self.readings if r.metric == metric]
        taps = list(dict.fromkeys(r.tap for r in found))
        if not found:
            raise KeyError(f"no metric {metric!r} in this profile; it holds {', '.join(self.metrics) or 'nothing'}")
        if tap not in taps and (tap is not None or len(taps) > 1):
            raise KeyError(f"{metric!r} was read at {', '.join(taps)}: name one, as in profile[…, {taps[0]!r}]")
        return sorted((r for r in found if r.tap == (tap or taps[0])), key=lambda r: r.layer)

    def __getitem__(self, key: str | tuple[str, str]) -> NDArray[np.float64]:
        metric, tap = (key, None) if isinstance(key, str) else key
        return np.array([r.mean for r in self.select(metric, tap)])

    def layers(self, metric: str, tap: str | None = None) -> list[int]:
        """The layers behind `profile[metric, tap]`."""
        return [r.layer for r in self.select(metric, tap)]

    def rows(self) -> list[dict[str, Any]]:
        return [r.row() for r in self.readings]

    @property
    def name(self) -> str:
        """What it is called beside others: the model as it was asked for, and its mitigation."""
        name, mitigation = self.context.get("name"), self.context.get("mitigation")
        return self.title if not name else f"{name} + {mitigation}" if mitigation else str(name)

    def table(self, *, spread: bool = False) -> FittedTable:
        """For the terminal: what the profile shows, and means by layer; with `spread` their deviations too."""
        cells: dict[tuple[str, ...], str] = {
            (r.tap, str(r.layer), r.metric): short(r.mean) + (f" ± {short(r.std, r.mean)}" if spread else "")
            for r in self.readings
        }
        over = f"over {self.context['runs']} runs" if self.context.get("runs") else "over samples"
        what = f"mean{' ± standard deviation' if spread else 's'} {over}; arrows point to smoother; {self.caption}"
        keys = "tap", "layer"
        return FittedTable(self.title, rows_by_metric(cells, keys), what, keys, ("tap",), headline=self.headline)

    def compare(self, *others: "Profile") -> "Comparison":
        """How others differ from this one, for example after a mitigation; `other - this` is the same for one."""
        from acutance.measure.comparison import compared

        return compared(self, *others)

    def __sub__(self, other: "Profile") -> "Comparison":
        return other.compare(self)

    @property
    def headline(self) -> str:
        """What the profile shows, in a sentence."""
        return headline_of(main_curve(self))

    @property
    def caption(self) -> str:
        """Where and how it was read, in one line."""
        parts = [f"{self.context.get('samples', '?')} samples"]
        parts += [f"{key}: {self.context[key]}" for key in ("data", "prefix", "dtype", "device") if key in self.context]
        return "; ".join(parts)

    def content(self) -> dict[str, Any]:
        return {
            "readings": [
                {name: to_plain(x) for name, x in r.row().items()}
                | ({} if r.values is None else {"values": b64encode(r.values.astype("<f4").tobytes()).decode()})
                for r in self.readings
            ]
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        # Version 0.1 called this tap `map`.
        rows = [row | {"tap": MATRIX if row["tap"] == "map" else row["tap"]} for row in body["readings"]]
        for row in rows:
            row |= {"mean": float(row["mean"]), "std": float(row["std"])}
            if "values" in row:  # not in files of before 0.2
                row["values"] = np.frombuffer(b64decode(row["values"]), "<f4")
        return cls(tuple(MetricValue(**row) for row in rows), body["context"])

    def plot(self) -> Figure:
        """A matplotlib figure: a panel per metric and tap, with a band of one standard deviation."""
        charts = list(dict.fromkeys((r.metric, r.tap) for r in self.readings))
        return plot_curves({self.title: self}, charts, self.title)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one offline page with the per-layer curves."""
        return write_page({self.title: self}, path)


def rows_by_metric(cells: Mapping[tuple[str, ...], str], keys: Sequence[str]) -> list[dict[str, str]]:
    """A row per place, which the keys name, and a column per metric, the last part of a cell's place."""
    heads = {metric: metric + ARROWS.get(higher_is(metric), "") for *_, metric in cells}
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for (*place, metric), text in cells.items():
        named = dict(zip(keys, place, strict=True))
        rows.setdefault(tuple(place), named | dict.fromkeys(heads.values(), ""))[heads[metric]] = text
    return [*rows.values()]
