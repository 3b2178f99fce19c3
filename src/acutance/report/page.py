"""One offline HTML page: the curves of some runs by layer, or the eigenvalues of one; and what was read where."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acutance.errors import import_extra
from acutance.files.atomic import atomic_write
from acutance.report.tables import Result, Rows, html_table

# Okabe and Ito's palette, which colour-blind readers can tell apart too.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]

TAP_NAMES = {
    "block": "residual stream after each block",
    "attention": "attention branch, before the residual",
    "values": "values",
    "final": "after the final norm",
    "attention_matrix": "attention operator",
}
HINT = "Click a name in a legend to single it out; hover a point for its value. Bands are one standard deviation. "
HINT += "Layer 0 is what enters the first block."
SPECTRUM_HINT = "H = W_projᵀW_Vᵀ with eigenvalues λ, A attention with eigenvalues μ. Orange smooths, blue sharpens."
# The same colours everywhere: positive eigenvalues and the μ = 1 family smooth, the others sharpen.
COLOURS = {"smoothing": "#D55E00", "sharpening": "#0072B2"}
FELL = "HFC/LFC fell across the branch"
COLUMNS = 4  # charts of eigenvalues side by side
POINTS = 2000  # eigenvalues of a layer shown on a page: keeps the page of a wide model small
Layers = Sequence[Any]  # the `LayerSpectrum`s of explain, whose room is above this one
NEEDS = "an HTML page needs altair and vl-convert-python: pip install 'acutance[report]'"


def sides(eigenvalues: NDArray[np.complex128]) -> NDArray[np.str_]:
    """Of each eigenvalue of H, smoothing where the constant part of the tokens grows: |1 + λ| > 1."""
    return np.where(np.abs(1 + eigenvalues) > 1, *COLOURS)


def write_page(
    runs: Mapping[str, Result],
    path: str | os.PathLike[str],
    verdict: str = "",
    summary: Rows = (),
    charts: Mapping[str, tuple[str, Any]] | None = None,
    title: str = "Over-smoothing, layer by layer",
    hint: str = HINT,
) -> Path:
    """Write one offline page about some runs: verdict, summary, charts, and what was read.

    `charts` are headings and Altair charts by name; by default one for each tap, with a curve of every run.
    """
    if charts is None:
        rows = [{"run": name} | row for name, run in runs.items() for row in run.rows()]
        taps = dict.fromkeys(row["tap"] for row in rows)
        charts = {tap: (TAP_NAMES.get(tap, tap), _curve_charts(list(runs), rows, tap)) for tap in taps}
    sections = [f"<h2>{escape(text)}</h2><div class='chart' id='chart-{id}'></div>" for id, (text, _) in charts.items()]
    facts = dict.fromkeys(key for run in runs.values() for key in run.context)
    read = [{"run": name} | {key: _text(run.context.get(key)) for key in facts} for name, run in runs.items()]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    body = template.substitute(
        title=escape(title),
        verdict=f"<p class='verdict'>{escape(verdict)}</p>" if verdict else "",
        summary=html_table(summary),
        hint=escape(hint),
        sections="".join(sections),
        context=html_table(read),
        # Safe inside a script element, whatever a run is called.
        charts=json.dumps({name: chart.to_dict() for name, (_, chart) in charts.items()}).replace("<", "\\u003c"),
        # Vega's JavaScript, embedded so that the page works offline.
        bundle=import_extra("vl_convert", NEEDS).javascript_bundle().replace("</script", "<\\/script"),
    )
    return atomic_write(path, body.encode())


def _curve_charts(runs: Sequence[str], rows: Sequence[Mapping[str, Any]], tap: str) -> Any:
    """A grid of small charts, one per metric, that share colours, legend and selection."""
    alt = import_extra("altair", NEEDS)
    pick = alt.selection_point(fields=["run"], bind="legend")
    faint, bold = (alt.condition(pick, *map(alt.value, pair)) for pair in ((0.15, 0.0), (1.0, 0.1)))
    low, mean = (alt.Y(f"{name}:Q", scale=alt.Scale(zero=False), title=None) for name in ("low", "mean"))
    charts = []
    for metric in dict.fromkeys(row["metric"] for row in rows if row["tap"] == tap):
        chosen = [row for row in rows if (row["metric"], row["tap"]) == (metric, tap)]
        chosen = [row for row in chosen if math.isfinite(row["mean"])]  # JSON has no infinity
        banded = [{**row, "low": row["mean"] - row["std"], "high": row["mean"] + row["std"]} for row in chosen]
        base = alt.Chart(alt.Data(values=banded)).encode(
            x=alt.X("layer:Q", axis=alt.Axis(tickMinStep=1), title="layer"),
            color=alt.Color("run:N", scale=alt.Scale(range=PALETTE), sort=runs, title=None),
            tooltip=[alt.Tooltip("run:N"), alt.Tooltip("layer:Q"), alt.Tooltip("mean:Q", format=".4g")],
        )
        band = base.mark_area().encode(y=low, y2="high:Q", opacity=faint)
        line = base.mark_line(point=True).encode(y=mean, opacity=bold)
        charts.append(alt.layer(band, line).properties(width=300, height=190, title=metric))
    grid = alt.concat(charts[0].add_params(pick), *charts[1:], columns=3)  # one legend picks in all charts
    return grid.configure_legend(orient="top", labelLimit=400, symbolOpacity=1)


def spectrum_charts(layers: Layers) -> dict[str, tuple[str, Any]]:
    """The eigenvalues by layer and, where they were read on data, what dominates: headings and charts by name."""
    alt, (edges, signs) = import_extra("altair", NEEDS), bins(layers)
    side = alt.Color("side:N", scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())), title=None)
    bars: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for row in layers:
        counts = np.histogram(row.spectrum.real, edges)[0].tolist()
        found = zip(edges[:-1].tolist(), edges[1:].tolist(), counts, signs, strict=True)
        bars += [{"layer": row.layer, "from": a, "to": b, "count": n, "side": colour} for a, b, n, colour in found if n]
        shown = row.spectrum[:: math.ceil(len(row.spectrum) / POINTS)]
        coloured = zip(shown.tolist(), sides(shown).tolist(), strict=True)
        points += [{"layer": row.layer, "re": z.real, "im": z.imag, "side": colour} for z, colour in coloured]

    def by_layer(rows: list[dict[str, Any]], mark: dict[str, Any], height: int, **encoding: Any) -> Any:
        chart = alt.Chart(alt.Data(values=rows), mark=mark, width=210, height=height)
        return chart.encode(color=side, **encoding).facet("layer:O", columns=COLUMNS)

    x, y = alt.X("from:Q", bin="binned", title="Re λ"), alt.Y("count:Q", title=None)
    histogram = by_layer(bars, {"type": "bar", "stroke": None}, 120, x=x, x2="to:Q", y=y)
    x, y = alt.X("re:Q", title="Re λ"), alt.Y("im:Q", title="Im λ")
    tooltip = [alt.Tooltip(f"{name}:Q", format=".4g") for name in ("re", "im")]
    plane = by_layer(points, {"type": "circle", "size": 14}, 160, x=x, y=y, tooltip=tooltip)
    charts = {"histogram": ("Eigenvalues of H by layer", histogram)}
    charts["plane"] = "Eigenvalues of H in the complex plane", plane
    if not all(row.percent() for row in layers):
        return charts
    data = [{"layer": row.layer} | row.percent() for row in layers]
    data = [{name: x if math.isfinite(x) else None for name, x in row.items()} for row in data]  # NaN: % of nothing
    y = alt.Y("percent:Q", title="% of samples and heads", scale=alt.Scale(domain=[0, 100]))
    base = alt.Chart(alt.Data(values=data)).encode(x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0)))
    bars = base.transform_fold(list(COLOURS), as_=["side", "percent"]).mark_bar().encode(y=y, color=side)
    shown = [name for name in layers[0].percent() if name not in COLOURS]
    tooltip = [alt.Tooltip(f"{name}:Q", title=f"{name}, %", format=".1f") for name in shown]
    dots = base.mark_point(color="black", filled=True, size=50).encode(y=f"{FELL}:Q", tooltip=tooltip)
    dominance = alt.layer(bars, dots).properties(width=max(300, 40 * len(data)), height=220)
    return {"dominance": (f"Which family dominates I + H⊗A (bars); how often {FELL} (dots)", dominance), **charts}


def bins(layers: Layers) -> tuple[NDArray[np.float64], list[str]]:
    """The edges of bins of one width for all layers, and the bins' sides: 0 is an edge, so that no bar mixes signs."""
    real = np.concatenate([np.zeros(1), *(row.spectrum.real for row in layers)])
    step = float(np.ptp(real)) / 40 or 1.0
    edges = step * np.arange(math.floor(real.min() / step) - 1, math.ceil(real.max() / step) + 2, dtype=np.float64)
    return edges, np.where(edges[:-1] >= 0, *COLOURS).tolist()


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "–" if value is None else f"{value:,}" if isinstance(value, int) and value < 10**12 else str(value)
