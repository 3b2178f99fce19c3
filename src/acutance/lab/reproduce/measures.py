"""How each kind of target is measured. What is measured is defined elsewhere, once: here it is only called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from acutance import sites
from acutance.explain import explain
from acutance.lab.reproduce.models import Inputs, read_models
from acutance.lab.reproduce.report import Line, Sheet
from acutance.lab.reproduce.target import Row
from acutance.lab.reproduce.trainings import LEARNT
from acutance.measure.measure import measure
from acutance.models import Segmenter

if TYPE_CHECKING:
    from acutance.lab.reproduce.session import Session

Measure = Callable[["Session"], list[Sheet]]
Values = dict[str, dict[int, float]]  # by column and seed


@dataclass(frozen=True)
class Reading:
    """What a column asks for, e.g. `test/token_cosine@block` or `val/perplexity?task.val_stride=1`."""

    split: str
    name: str
    tap: str | None = None
    settings: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Reading:
        """Read it from a target's column."""
        text, _, settings = text.partition("?")
        text, _, tap = text.partition("@")
        split, _, name = text.partition("/")
        return cls(split, name, tap or None, tuple(settings.split("&")) if settings else ())


def scores(session: Session) -> list[Sheet]:
    """Tables of scores on the test set; a column with a tap is a metric after the last layer."""
    readings = {column: Reading.of(text) for column, text in session.target.columns.items()}
    lines = []
    for row in session.target.rows:
        values: Values = {column: {} for column in readings}
        note = session.why_missing(row)
        for column, reading in readings.items():
            if reading.tap is not None:
                curves, note = _curves(session, row, reading)
                values[column] = {seed: curve[max(curve)] for seed, curve in curves.items()}
                continue
            for seed in session.ready(row):
                found = session.scores(row, seed, reading.split, reading.settings)
                values[column][seed] = found[reading.name]
        lines.append(Line(row.label, values, row.published, note))
    return [Sheet(session.target.title, list(readings), lines)]


def ablation(session: Session) -> list[Sheet]:
    """Scores, the first of them also beside the first row's at the same seeds; and where learnt λ̃ end, by layer."""
    (table,) = scores(session)
    column, beside = table.columns[0], f"{table.columns[0]} beside {table.lines[0].label}"
    base = table.lines[0].measured[column]
    lines = []
    for line in table.lines:
        found = {seed: value - base[seed] for seed, value in line.measured[column].items() if seed in base}
        lines.append(replace(line, measured={**line.measured, beside: found}))
    whole = replace(table, columns=[column, beside, *table.columns[1:]], lines=lines)
    return [whole, _learnt_strengths(session)]


def _learnt_strengths(session: Session) -> Sheet:
    """The mean over heads; layer 1 has none."""

    def read(model: nn.Module, _: Inputs) -> dict[int, float]:
        learnt = {site.layer: getattr(site.mitigation, "learnt_strength", None) for site in sites.find(model)}
        return {layer: float(values.detach().mean()) for layer, values in learnt.items() if values is not None}

    rows = [row for row in session.target.rows if row.training is not None and row.training.endswith(LEARNT)]
    lines, depths = _by_layer((row.label, *read_models(session, row, None, read)) for row in rows)
    return Sheet("λ̃ after training", depths, lines, digits=3)


def layer_means(session: Session) -> list[Sheet]:
    """Tables of one metric, mean over layers."""
    readings = {column: Reading.of(text) for column, text in session.target.columns.items()}
    lines = []
    for row in session.target.rows:
        found = {column: _curves(session, row, reading) for column, reading in readings.items()}
        values: Values = {
            column: {seed: sum(curve.values()) / len(curve) for seed, curve in curves.items()}
            for column, (curves, _) in found.items()
        }
        lines.append(Line(row.label, values, row.published, session.why_missing(row)))
    return [Sheet(session.target.title, list(readings), lines, digits=3)]


def layers(session: Session) -> list[Sheet]:
    """Figures of one metric by layer, as sheets with a column for each layer."""
    sheets = []
    for column, text in session.target.columns.items():
        reading = Reading.of(text)
        lines, depths = _by_layer((row.label, *_curves(session, row, reading)) for row in session.target.rows)
        sheets.append(Sheet(column, depths, lines, digits=4))
    return sheets


def _by_layer(rows: Iterable[tuple[str, Mapping[int, Mapping[int, float]], str]]) -> tuple[list[Line], list[str]]:
    """Lines of (label, values by seed and layer, note), and their columns: one for each layer."""
    lines, depths = [], dict[int, None]()
    for label, curves, note in rows:
        values: Values = {}
        for seed, curve in curves.items():
            depths |= dict.fromkeys(curve)
            for layer, value in curve.items():
                values.setdefault(_layer(layer), {})[seed] = value
        lines.append(Line(label, values, note=note))
    return lines, [_layer(layer) for layer in sorted(depths)]


def _layer(number: int) -> str:
    return f"layer {number}"


def _curves(session: Session, row: Row, reading: Reading) -> tuple[dict[int, dict[int, float]], str]:
    """A metric by seed and layer, and why seeds are missing."""
    tap = "block" if reading.tap in (None, "map") else str(reading.tap)

    def read(model: nn.Module, inputs: Inputs) -> dict[int, float]:
        assert inputs is not None, "a split was named"
        part = "encoder" if isinstance(model, Segmenter) else None
        profile = measure(model, inputs, metrics=[reading.name], tap=tap, part=part, progress=False)
        return {found.layer: found.mean for found in profile.select(reading.name)}

    return read_models(session, row, reading.split, read)


def dominance(session: Session) -> list[Sheet]:
    """Which family dominates I + H⊗A, in percent of samples, layers and heads."""

    def read(model: nn.Module, inputs: Inputs) -> dict[str, float]:
        share = explain(model, inputs, progress=False).share()
        return {"smoothing": 100 * share.smoothing, "sharpening": 100 * share.sharpening}

    lines = [_line(session, row, *read_models(session, row, "test", read)) for row in session.target.rows]
    return [Sheet(session.target.title, list(session.target.columns), lines)]


def spectra(session: Session) -> list[Sheet]:
    """The eigenvalues of H: the share with a negative real part and the median, with a histogram of the last seed."""
    from acutance.lab.studies.pictures import save_picture

    def read(row: Row, model: nn.Module, _: Inputs) -> dict[str, float]:
        found = explain(model, progress=False)
        save_picture(found.picture("histogram"), session.path("spectrum", row.label))
        count = len(found.layers)
        return {
            "negative": 100 * sum(layer.negative_share for layer in found.layers) / count,
            "median": sum(layer.quantiles[2] for layer in found.layers) / count,
        }

    rows = session.target.rows
    lines = [_line(session, row, *read_models(session, row, None, partial(read, row))) for row in rows]
    return [Sheet(session.target.title, list(session.target.columns), lines, digits=4)]


def _line(session: Session, row: Row, found: Mapping[int, Mapping[str, float]], note: str) -> Line:
    """What was read of a row's models, put into the target's columns."""
    columns = session.target.columns
    values = {column: {seed: read[name] for seed, read in found.items()} for column, name in columns.items()}
    return Line(row.label, values, row.published, note)


def maps(session: Session) -> list[Sheet]:
    """Attention maps of the first, the middle and the last layer, as pictures."""
    from acutance.lab.studies.pictures import save_picture
    from acutance.measure.maps import attention_maps

    lines = []
    for row in session.target.rows:
        words = session.why_missing(row)
        for seed in session.ready(row)[:1]:
            model = session.model(row, seed)
            depth = len(model.blocks)  # type: ignore[arg-type] # a ViT's
            found = attention_maps(model, session.inputs(row, "test")[0][:1].to(session.device), _three(depth))
            words = ", ".join(path.name for path in save_picture(found.plot(), session.path("maps", row.label)))
        lines.append(Line(row.label, note=words))
    return [Sheet(session.target.title, [], lines)]


def _three(depth: int) -> list[int]:
    """Layers 1, 6 and 12 of twelve."""
    return sorted({1, max(1, depth // 2), depth})


def norms(session: Session) -> list[Sheet]:
    """One layer repeated under every norm, for three spectra of H."""
    from acutance.lab.studies import norm_grid
    from acutance.lab.studies.pictures import repeat_picture, save_picture

    grid = norm_grid(layers=5 if session.scale == "tiny" else 60)
    save_picture(repeat_picture(grid), session.path("norms"))
    lines = [
        Line(norm, {spectrum: {0: float(t.hfc_lfc[:, -1].mean())} for spectrum, t in curves.items()})
        for norm, curves in grid.items()
    ]
    return [Sheet(next(iter(session.target.columns)), list(next(iter(grid.values()))), lines, digits=4)]


def efficiency(session: Session) -> list[Sheet]:
    """Ratios of what inference costs with a mitigation and without."""
    from acutance.lab.reproduce.efficiency import ratios

    row = session.target.rows[0]
    found = {seed: ratios(session, row, seed) for seed in session.seeds}
    columns = session.target.columns
    values = {column: {seed: r[name] for seed, r in found.items() if name in r} for column, name in columns.items()}
    return [Sheet(session.target.title, list(columns), [Line(row.label, values, row.published)], digits=5)]


def robustness(session: Session) -> list[Sheet]:
    """Accuracy on corrupted and attacked test images."""
    from acutance.lab.reproduce import robust

    return robust.robustness(session)


MEASURES: Mapping[str, Measure] = {
    "scores": scores,
    "ablation": ablation,
    "layer-means": layer_means,
    "layers": layers,
    "maps": maps,
    "efficiency": efficiency,
    "dominance": dominance,
    "spectra": spectra,
    "norms": norms,
    "robustness": robustness,
}
