"""How much each layer of a language model smooths: by its weights, and on a text.

Figures 5 and 2 of Setting the Record Straight (https://arxiv.org/abs/2401.04301) for one language model: the spectra of
H, and the definitions of over-smoothing by layer. The change of log HFC/LFC across a block is split after the attention
branch is added: the part before is due to attention, the part after to the rest of the block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from acutance import sites
from acutance.errors import AcutanceError
from acutance.explain import Dominance, LayerSpectrum
from acutance.explain.read import with_data
from acutance.explain.weights import layer_spectrum
from acutance.io import LoadedModel
from acutance.lab.files import digest, finite, short
from acutance.measure import measure
from acutance.measure.walk import describe, track
from acutance.report.tables import FittedTable

FORMAT = "acutance-layers/1"
STREAM = ("hfc_lfc_spectral", "token_cosine", "singular_ratio")
LEAST = 5  # batches; the range of n batches holds the true median in 1 − 2^(1−n) of cases: 94 % for five


def middle_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, lowest and highest over batches."""
    return float(np.median(values)), min(values), max(values)


@dataclass(frozen=True)
class LayersStudy:
    """One model on one text. A list has a number for each batch."""

    context: Mapping[str, Any]  # `norm` says how the pre-norm's weight was treated
    layers: Sequence[Mapping[str, Any]]  # those with attention
    stream: Mapping[str, Sequence[Sequence[float]]]  # by metric and block: the first block's input, then all outputs

    def table(self) -> FittedTable:
        """A row per layer: the median, lowest and highest batch."""
        rows = []
        for at in self.layers:
            row = {"layer": str(at["layer"]), "Re λ < 0": f"{at['negative_share']:.0%}"}
            for name, key in {"μ = 1 dominates": "smoothing", "by head": "smoothing_by_head"}.items():
                row[name] = "{:.0%} ({:.0%} to {:.0%})".format(*middle_and_range(at[key]))
            for key in ("attention", "rest"):
                row[key] = "{:+.3f} ({:+.3f} to {:+.3f})".format(*middle_and_range(at[key]))
            rows.append(row)
        read = f"{self.context['batches']} batches of {self.context['windows']} windows"
        left = f", the first {n} tokens of each left out" if (n := self.context["leave_out"]) else ""
        caption = f"log change of HFC/LFC by part of the block; median, lowest and highest of {read}{left}"
        return FittedTable(f"layers of {self.context['name']}", rows, caption)

    def to_json(self, made: Mapping[str, Any]) -> bytes:
        """The record as JSON; `made` says when, by which command and on what machine."""
        versions = {**made.get("versions", {}), **self.context["versions"]}
        body = {"format": FORMAT, **made, **self.context, "versions": versions}
        body |= {"stream": self.stream, "layers": self.layers}
        return f"{json.dumps(short(finite(body)), indent=1, ensure_ascii=False)}\n".encode()


def layers_study(
    loaded: LoadedModel,
    text: str | Path,
    *,
    tokens: int | None = None,
    batches: int = 8,
    windows: int = 8,
    leave_out: int = 0,
    progress: bool = True,
) -> LayersStudy:
    """Explain and measure a language model on windows spread evenly over a text (a file or folder), batch by batch.

    A batch takes its windows from one part of the text, so batches are nearly independent. With `leave_out`, HFC/LFC
    ignores that many first tokens of a window, and special tokens: in many models the first token is larger than all
    others together. Attention still includes them.
    """
    if batches < LEAST:
        raise AcutanceError(f"{batches} batches give no interval: take {LEAST} or more")
    found, wanted = loaded.text_batches(text, tokens=tokens, batch=windows), batches * windows
    if (held := len(found.samples)) < wanted:
        raise AcutanceError(f"{text} has {held} windows, {batches} batches of {windows} need {wanted}")
    chosen = replace(found, samples=[found.samples[(2 * n + 1) * held // (2 * wanted)] for n in range(wanted)])
    model, explained, measured = loaded.model, [], []
    prefix: Literal["in", "out"] = "out" if leave_out else "in"
    with ExitStack() as stack, torch.no_grad():
        layers = {site: layer_spectrum(site) for site in sites.find(model)}
        for batch in track(chosen, "batches" if progress else None, stack):
            batch["special_tokens_mask"][:, :leave_out] = 1
            explained.append(with_data(model, layers, [batch], prefix=prefix))
            measured.append(measure(model, [batch], metrics=STREAM, prefix=prefix, progress=False))
    numbers = [number for _, number in sites.layers_of(model)]
    rows = [_row(*at) for at in zip(numbers, layers.values(), zip(*explained, strict=True), strict=True)]
    curves = {name: np.array([profile[name] for profile in measured]).T.tolist() for name in STREAM}
    about: dict[str, Any] = {"name": loaded.name, "data": f"{wanted} of {found.description}, evenly spaced"}
    about |= {"sha256": _digest(text), "batches": batches, "windows": windows, "leave_out": leave_out}
    about |= {"prefix": measured[0].context["prefix"], "norm": list(dict.fromkeys(at.norm for at in layers.values()))}
    return LayersStudy({**describe(model), **about}, rows, curves)


def _digest(text: str | Path) -> str:
    """SHA-256 of a file, or over the checksums of a folder's files."""
    path = Path(text)
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    return sha256("".join(map(digest, files)).encode()).hexdigest() if len(files) > 1 else digest(files[0])


def _row(number: int, layer: LayerSpectrum, found: Sequence[LayerSpectrum]) -> dict[str, Any]:
    seen: list[Dominance] = [batch.dominance for batch in found if batch.dominance is not None]
    attention = [at.branch.change for at in seen]
    return {
        "layer": number,
        "negative_share": layer.negative_share,
        "real_quantiles": list(layer.quantiles),
        "symmetry": layer.symmetry,
        "smoothing": [at.predicted.smoothing for at in seen if at.predicted is not None],
        "smoothing_by_head": [float(np.mean([head.smoothing for head in at.heads])) for at in seen],
        "agreement": [at.branch.agreement for at in seen],
        "attention_fell": [at.branch.fell for at in seen],
        "attention": attention,
        "rest": [at.block.change - change for at, change in zip(seen, attention, strict=True)],
    }
