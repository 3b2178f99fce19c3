"""Diagnosis: a headline and the findings, each with its evidence, what it means and what to try."""

import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import nn

from acutance.diagnose.findings import SEVERITIES, Finding, Severity, by_part, findings, named
from acutance.diagnose.prune import Removal, prune
from acutance.diagnose.readings import Numbers, Readings, read
from acutance.errors import AcutanceError
from acutance.explain.spectrum import Spectrum
from acutance.measure.profile import Profile
from acutance.measure.walk import describe
from acutance.report.page import write_page
from acutance.report.tables import WIDTH, FittedTable, Result
from acutance.sites.structure import bare_module

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "severe": "bold red"}


@dataclass(frozen=True, eq=False)
class Diagnosis(Result):
    """What is wrong with a model, and what it was read from."""

    FORMAT = "acutance-diagnosis/1"
    headline: str
    findings: tuple[Finding, ...]  # the worst first
    profile: Profile
    spectrum: Spectrum | None  # of the weights; None where they are not known
    readings: Readings
    context: Mapping[str, Any]
    removals: tuple[Removal, ...] = ()  # the layers that could go, by themselves and together, if that was asked for

    @property
    def severity(self) -> Severity:
        """That of the worst finding, "ok" without one."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default="ok")

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(finding) for finding in self.findings]

    def table(self) -> FittedTable:
        cells = [{name: _text(value) for name, value in row.items()} for row in self.rows()]
        left = tuple(cells[0]) if cells else ()
        return FittedTable(self.title, cells, self.caption, keys=("name",), left=left, headline=self.headline)

    @property
    def caption(self) -> str:
        """What was read."""
        facts = self.readings.facts
        read = self.context.get("data") or f"{facts['samples']} samples of up to {facts['tokens']} tokens"
        return f"{self.context.get('name') or self.title}: {self.readings.layers} layers, read on {read}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(WIDTH, options.max_width)
        yield Text("\n".join(_lines(self.caption, width)), style="table.caption")
        yield Text("\n".join(_lines(self.headline, width)), style="bold")
        for finding in self.findings:
            yield Text.assemble("\n", (f"{finding.severity:<9}", STYLES[finding.severity]), (finding.name, "bold"))
            for sentence in (f"{finding.evidence}.", finding.meaning):
                yield Text("\n".join(f"{'':9}{line}" for line in _lines(sentence, width - 9)))
            glued = re.sub(r"(--\S+) ", "\\1\0", finding.advice)  # an option and its value stay together
            command = " \\\n             ".join(_lines(glued, width - 15)).replace("\0", " ")
            yield Text(f"{'try':>8} {command}", style="green")
        for removal in self.removals:
            yield Text("\n".join(_lines(str(removal), width)))

    def __str__(self) -> str:
        console = Console(width=WIDTH, no_color=True)
        with console.capture() as capture:
            console.print(self, soft_wrap=False)
        return capture.get()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one offline page with the findings and the per-layer curves."""
        title = f"Diagnosis of {self.context.get('name') or self.title}"
        return write_page({self.title: self.profile}, path, self.headline, self.table().rows, title=title)

    def content(self) -> dict[str, Any]:
        curves = {name: _without_nan(curve) for name, curve in self.readings.curves.items()}
        return {
            "headline": self.headline,
            "findings": self.rows(),
            "profile": self.profile.to_dict(),
            "spectrum": None if self.spectrum is None else self.spectrum.to_dict(),
            "readings": {"curves": curves, "facts": dict(self.readings.facts)},
            "removals": [asdict(removal) for removal in self.removals],
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        found = [Finding(**row | {"layers": tuple(row["layers"])}) for row in body["findings"]]
        spectrum = None if body["spectrum"] is None else Spectrum.from_dict(body["spectrum"])
        curves = {name: np.array(curve, np.float64) for name, curve in body["readings"]["curves"].items()}
        readings = Readings(curves, body["readings"]["facts"])
        profile = Profile.from_dict(body["profile"])
        removals = tuple(Removal(**row | {"layers": tuple(row["layers"])}) for row in body["removals"])
        return cls(body["headline"], tuple(found), profile, spectrum, readings, body["context"], removals)


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    part: str | None = None,
    remove: int = 0,
    quality: Any = None,
    progress: bool = True,
    context: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Say whether a model over-smooths, where and why, what else is wrong with it, and what to try.

    One pass over the batches, then the weights. The model is read in evaluation mode and left as it was found.

    Args:
        model: any model `acutance.sites.find` knows; of others, the tokens alone.
        batches: as `measure` takes them. Some dozens of samples are enough.
        part: path of the submodule to read, if a model has several stacks of layers, e.g. `model.encoder`.
        remove: leave out so many layers, those that change their input least, and measure what that costs. The batches
            are then a list, which is read several times.
        quality: what is measured then, as `acutance.diagnose.quality.objective_of` takes it; by default what fits.
        progress: show progress bars.
        context: what the model is called, `name`, and its data, `data`; `options` give them on the command line.
    """
    bare = bare_module(model)
    if remove and not isinstance(batches, Sequence):
        raise AcutanceError("layers are left out one by one, each time reading all batches: pass a list of them")
    readings, values, spectra = read(bare, batches, part=part, progress=progress)
    told = dict(context or {})
    about = {**describe(bare, part), "samples": readings.facts["samples"], "prefix": "special tokens in", **told}
    spectrum = Spectrum(spectra, about | {"norm": "pre-norm weight γ: folded"}) if spectra else None
    found = findings(readings)
    usual = "--images DIR" if readings.facts["images"] else "--text FILE"
    given = {"model": shlex.quote(told.get("name", "MODEL")), "data": told.get("options", usual)}
    advised = tuple(replace(finding, advice=finding.advice.format(**given).replace("  ", " ")) for finding in found)
    removals: tuple[Removal, ...] = ()
    if remove and isinstance(batches, Sequence):
        removals = prune(bare, batches, readings["influence"], remove, part=part, quality=quality)
    return Diagnosis(headline(readings, found), advised, Profile(values, about), spectrum, readings, about, removals)


def headline(r: Readings, found: Iterable[Finding]) -> str:
    """Is the model over-smoothing, where, why, and does it matter: in a sentence or two."""
    by_name = {finding.name: finding for finding in found}
    start, end = r["cosine"][[0, -1]]
    wrong = [finding.name for finding in by_name.values() if finding.severity in ("warning", "severe")]
    alike = by_name.get("tokens alike")
    if alike is None and not wrong:
        why = f"tokens stay apart (mean cosine {end:.2f} after the last of {r.layers} layers)"
        if not {"idle layers", "idle heads"} & by_name.keys():
            why += f", and every layer{' and head' if 'head_share' in r else ''} adds something of its own"
        return f"Nothing wrong: {why}."
    first = f"No over-smoothing (mean cosine of tokens {end:.2f} after the last of {r.layers} layers)"
    if alike is not None:
        how = "Tokens grow alike" if alike.severity == "note" else "Over-smoothing: tokens grow alike"
        where = f"mostly in {named(alike.layers)}{by_part(r, alike.layers)}"
        first = f"{how} (mean cosine {start:.2f} to {end:.2f}), {where}"
        if end - start < 0.1:
            first = f"Tokens are alike from the start (mean cosine {start:.2f})"
        first += "; by itself that is no fault" if alike.severity == "note" else ""
    others = [name for name in wrong if name != "tokens alike"]
    return f"{first}. What is wrong: {', '.join(others)}." if others else f"{first}. Nothing else is wrong."


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _without_nan(values: Numbers) -> Any:
    """As lists, with None for NaN, which JSON has not."""
    return np.where(np.isnan(values), np.array(None), values.astype(object)).tolist()


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
