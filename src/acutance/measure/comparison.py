"""Comparison: how profiles differ from the first of them, layer by layer, with intervals."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from acutance.measure.headline import WHOSE, direction, is_small, main_curve
from acutance.measure.intervals import margin_of, student
from acutance.measure.profile import MATRIX, MetricValue, Profile, rows_by_metric
from acutance.report.page import write_page
from acutance.report.tables import FittedTable, Result, short


@dataclass(frozen=True)
class Difference:
    """How far a metric of another profile is above that of the first."""

    run: str  # the other's name
    tap: str
    layer: int
    metric: str
    first: float
    other: float
    difference: float
    half: float  # half the width of its interval; NaN for one sample
    pairs: int  # 0 if the samples are not the same or were not kept

    def __str__(self) -> str:
        interval = "" if math.isnan(self.half) else f" ±{short(self.half)}"
        sign = "−" if self.difference < 0 else "+"
        return "–" if math.isnan(self.difference) else f"{sign}{short(abs(self.difference))}{interval}"


@dataclass(frozen=True)
class Comparison(Result):
    """Profiles by name. Each is compared with the first, over the samples that both have read.

    The interval of a difference is Student's, of the mean over pairs of samples if both profiles read the same ones and
    kept their values, else Welch's for independent samples.
    """

    FORMAT = "acutance-profiles-compared/1"
    INDENT = None
    profiles: Mapping[str, Profile]
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def differences(self) -> list[Difference]:
        """What both the first and another profile have read."""
        (_, first), *others = self.profiles.items()
        found = []
        for name, other in others:
            digest, known = first.context.get("digest"), {(r.tap, r.layer, r.metric): r for r in other.readings}
            is_same = digest is not None and digest == other.context.get("digest")
            both = [(r, known[key]) for r in first.readings if (key := (r.tap, r.layer, r.metric)) in known]
            found += [_difference(name, a, b, is_same=is_same) for a, b in both]
        return found

    @property
    def headline(self) -> str:
        """What the comparison shows, in a sentence about the last layer; then how quality differs, if that is known."""
        name, first = next(iter(self.profiles.items()))
        shown = {(r.tap, r.metric) for r in main_curve(first)}
        last = {d.run: d for d in self.differences if (d.tap, d.metric) in shown}
        said = [
            f"{_words(d, name)} after layer {d.layer}: {d.metric} {short(d.other)} beside {short(d.first)} ({d})"
            for d in last.values()
        ]
        return "\n".join([*([f"{'; '.join(said)}."] if said else []), *self.context.get("quality", ())])

    def table(self) -> FittedTable:
        found, columns = self.differences, ("run", "tap", "layer")
        rows = rows_by_metric({(d.run, d.tap, str(d.layer), d.metric): str(d) for d in found}, columns)
        alike = [name for name in columns[:2] if len({row[name] for row in rows}) == 1]
        shown = [{name: text for name, text in row.items() if name not in alike} for row in rows]
        first, *others = self.profiles
        pairs = sorted(d.pairs for d in found)
        notes = [f"differences from {first} ± half of a 95% interval, each by itself"]
        unpaired = f"samples are not {'all ' if pairs and pairs[-1] else ''}paired"
        notes += [f"paired over {pairs[-1]} samples" if pairs and pairs[0] else unpaired]
        notes += ["arrows point to smoother", *(f"tap: {found[0].tap}" for name in alike if name == "tap")]
        keys = [name for name in columns if name not in alike]
        title = f"{', '.join(others)} less {first}"
        return FittedTable(title, shown, "; ".join(notes), keys=keys, left=keys[:-1], headline=self.headline)

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(d) for d in self.differences]

    def content(self) -> dict[str, Any]:
        return {"profiles": {name: profile.to_dict() for name, profile in self.profiles.items()}}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        return cls({name: Profile.from_dict(one) for name, one in body["profiles"].items()}, body["context"])

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one offline page with the sentence, the differences and the curves of all."""
        return write_page(self.profiles, path, self.headline, self.table().rows)


def compared(*profiles: Profile) -> Comparison:
    """The comparison of profiles by their names, without the folder that all share; equal names are numbered."""
    found: dict[str, Profile] = {}
    start = os.path.commonprefix([profile.name for profile in profiles]).rfind("/") + 1  # noqa: RUF071 # up to a slash
    for number, profile in enumerate(profiles, 1):
        name = profile.name[start:]
        found[name if name not in found else f"{name} ({number})"] = profile
    return Comparison(found)


def _difference(name: str, a: MetricValue, b: MetricValue, *, is_same: bool) -> Difference:
    x, y = a.values, b.values
    pairs = len(x) if is_same and x is not None and y is not None and len(x) == len(y) else 0
    if pairs:
        half = margin_of(np.subtract(y, x, dtype=np.float64))  # type: ignore[arg-type]
    elif min(counts := np.array([a.count, b.count])) < 2:
        half = math.nan
    else:
        parts = np.square([a.std, b.std]) / counts
        error = float(parts.sum())
        freedom = error**2 / float((parts**2 / (counts - 1)).sum()) if error else float(counts.min() - 1)
        half = math.sqrt(error) * student(freedom)
    return Difference(name, a.tap, a.layer, a.metric, a.mean, b.mean, b.mean - a.mean, half, pairs)


def _words(d: Difference, first: str) -> str:
    if abs(d.difference) <= d.half or math.isnan(d.difference):
        return f"{d.run} and {first} do not differ clearly"
    if is_small(d.difference, d.metric, d.first, d.other):
        return f"{d.run} differs little from {first}"
    moved = direction(d.difference, d.metric, d.first, d.other)
    if not moved or d.tap == MATRIX:
        return f"{d.run} is {'above' if d.difference > 0 else 'below'} {first}"
    return f"{d.run}: {WHOSE.get(d.tap, 'Tokens').lower()} are {'more' if moved > 0 else 'less'} alike than in {first}"
