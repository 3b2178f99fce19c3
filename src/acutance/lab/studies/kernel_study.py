"""The kernel assumptions of several trained models side by side, beside Table 4 of https://arxiv.org/abs/2312.00751."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from acutance.errors import AcutanceError, MissingExtraError
from acutance.explain.statistics import mean_known
from acutance.files.atomic import atomic_write, finite
from acutance.io.loading import LoadedModel
from acutance.lab.data import digits
from acutance.lab.studies.assumptions import MEASURES, KernelAssumptions, kernel_assumptions
from acutance.measure.walk import describe

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Table 4's alignment by the model's attention, on training and on test images of ImageNet.
PAPER: Mapping[str, Mapping[str, float]] = {
    "softmax": {"train": 0.973, "test": 0.964},
    "symmetric": {"train": 0.982, "test": 0.976},
}
BATCH, TEXT_BATCH = 64, 4
SHOWN = ("kernel_asymmetry", "kernel_negative")
WEIGHTS = ("weights_asymmetry", "weights_negative")
# The rows of the table, from a row of `KernelStudy.summary`.
FIGURES: Mapping[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "alignment": lambda row: row["alignment"],
    "asymmetry of exp(q·k/√d)": lambda row: row["kernel_asymmetry"],
    "… with its entries permuted": lambda row: row["kernel_asymmetry_permuted"],
    "negative share of exp(q·k/√d)": lambda row: row["kernel_negative"],
    "… with them permuted": lambda row: row["kernel_negative_permuted"],
    "asymmetry of W_QᵀW_K": lambda row: row["weights_asymmetry"],
    "negative share of W_QᵀW_K": lambda row: row["weights_negative"],
    "ρ asymmetry, pooled": lambda row: row["pooled"]["kernel_asymmetry"],
    "ρ asymmetry, within a layer": lambda row: row["within"]["kernel_asymmetry"],
    "ρ negative share, pooled": lambda row: row["pooled"]["kernel_negative"],
    "ρ negative share, within a layer": lambda row: row["within"]["kernel_negative"],
}


@dataclass(frozen=True)
class KernelStudy:
    """What `kernel_assumptions` found, by run and by data (train and test images, or the name of a text).

    Runs named alike but for `-seed0`, `-seed1`, … at the end are one variant: its figures are means over the runs with
    their spread (standard deviation).
    """

    runs: Mapping[tuple[str, str], KernelAssumptions]
    samples: Mapping[str, int]  # images or windows of text read, by data
    versions: Mapping[str, str]

    def to_frame(self) -> pd.DataFrame:
        """One row per run, data, layer and head: the measures and the alignment, means over samples."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_frame needs pandas: pip install 'acutance[report]'") from error
        return pd.DataFrame(
            {"variant": variant_of(run), "run": run, "data": data, **row, **within}
            for (run, data), found in self.runs.items()
            for row, within in zip(found.rows(), _within(found), strict=True)
        )

    def summary(self) -> list[dict[str, Any]]:
        """One row per variant and data: every figure as mean and spread over runs.

        `pooled` is the rank correlation with the alignment over layers × samples × heads, `within` the mean over layers
        of the one over samples × heads.
        """
        groups: dict[tuple[str, str], list[KernelAssumptions]] = {}
        for (run, data), found in self.runs.items():
            groups.setdefault((variant_of(run), data), []).append(found)
        return [
            {"variant": variant, "data": data, "runs": len(group)}
            | {name: _spread([float(f.samples[name].mean()) for f in group]) for name in group[0].samples}
            | {name: _spread([mean_known(getattr(f, name)) for f in group]) for name in WEIGHTS}
            | {
                "pooled": {name: _spread([f.correlations()[name] for f in group]) for name in MEASURES},
                "within": {name: _spread([mean_known(f.layer_correlations()[name]) for f in group]) for name in SHOWN},
            }
            for (variant, data), group in groups.items()
        ]

    def table(self) -> Table:
        """A column per variant: alignment, how far exp(q·k/√d) is from the assumptions, how the two go together."""
        paper = "; ".join(f"{name} {row['train']} train, {row['test']} test" for name, row in PAPER.items())
        table = Table(
            title="kernel assumptions of trained models",
            caption=f"mean ± spread over runs; ρ: rank correlation with alignment. Table 4 (DeiT, ImageNet): {paper}",
            title_justify="left",
            caption_justify="left",
        )
        rows = self.summary()
        table.add_column("data")
        table.add_column("")
        for row in rows:
            if row["data"] == rows[0]["data"]:
                table.add_column(f"{row['variant']}, {row['runs']} run{'s' * (row['runs'] > 1)}", no_wrap=True)
        for data in self.samples:
            for name, read in FIGURES.items():
                figures = (_shown(read(row), row["runs"]) for row in rows if row["data"] == data)
                table.add_row(data, name, *figures, end_section=name == list(FIGURES)[-1])
        return table

    def picture(self) -> Figure:
        """By layer: alignment, distances from the assumptions, correlation; a curve per variant and data."""
        from acutance.lab.studies.pictures import kernel_picture

        return kernel_picture(self.to_frame())

    def save(self, folder: str | os.PathLike[str], *, context: Mapping[str, Any] | None = None) -> list[Path]:
        """Write kernel.csv, kernel.json, kernel.png and kernel.svg."""
        from acutance.lab.studies.pictures import save_picture

        body = {
            **(context or {}),
            "versions": self.versions,
            "samples": self.samples,
            "paper": PAPER,
            "summary": self.summary(),
        }
        place, text = Path(folder), json.dumps(finite(body), indent=1, ensure_ascii=False)
        return [
            atomic_write(place / "kernel.csv", self.to_frame().to_csv(index=False, float_format="%.5g").encode()),
            atomic_write(place / "kernel.json", text.encode()),
            *save_picture(self.picture(), place / "kernel"),
        ]


def kernel_study(
    models: Mapping[str, Callable[[], nn.Module | LoadedModel]],
    *,
    samples: int = 1000,
    text: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    advance: Callable[[str], None] = lambda _doing: None,
) -> KernelStudy:
    """Read every model on evenly spaced training and test images of the embedded digits, or on a text.

    Args:
        models: by the name of the run; each is loaded when its turn comes, so that one is held at a time. Text needs
            what `acutance.io.loading.load_model` returns.
        samples: images of each split, or all of it if it has fewer (Table 4 has 1000); or windows of text.
        text: a text file or a folder of them, in place of the digits.
        tokens: the length of a window of text.
        advance: called with a description before each batch.
    """
    if not models:
        raise AcutanceError("kernel_study got no models: name at least one run")
    runs, versions, counts = {}, {}, {}
    for run, load in models.items():
        loaded = load()
        model = loaded.model if isinstance(loaded, LoadedModel) else loaded
        versions = describe(model)["versions"]
        data = _digit_batches(samples) if text is None else _text_batches(loaded, text, tokens, samples)
        for name, batches in data.items():
            runs[run, name] = kernel_assumptions(model, _announced(batches, partial(advance, f"{run}, {name}")))
            counts[name] = runs[run, name].alignment.shape[1]
    return KernelStudy(runs, counts, versions)


def batch_count(samples: int, *, text: bool = False) -> int:
    """How often `kernel_study` calls `advance` for one model."""
    return -(-samples // TEXT_BATCH) if text else sum(map(len, _digit_batches(samples).values()))


def variant_of(run: str) -> str:
    """The run's name without its seed."""
    return re.sub(r"-seed\d+$", "", run)


def _digit_batches(samples: int) -> dict[str, Sequence[Tensor]]:
    chosen = {}
    for name, split in zip(("train", "test"), digits(), strict=True):
        spaced = torch.linspace(0, len(split) - 1, min(samples, len(split))).round().long()
        chosen[name] = split.images[spaced].split(BATCH)
    return chosen


def _text_batches(
    loaded: nn.Module | LoadedModel, text: str | os.PathLike[str], tokens: int | None, samples: int
) -> dict[str, Sequence[Any]]:
    if not isinstance(loaded, LoadedModel):
        raise AcutanceError(
            f"kernel_study(..., text=...) got a bare {type(loaded).__name__}, without the tokenizer that reads text: "
            'give lambda: load_model("hf:…") of acutance.io.loading'
        )
    path = Path(text)
    return {path.name: loaded.text_batches(path, tokens=tokens, batch=TEXT_BATCH, limit=samples)}


def _announced(batches: Sequence[Any], announce: Callable[[], None]) -> Iterator[Any]:
    for index in range(len(batches)):
        announce()
        yield batches[index]


def _within(found: KernelAssumptions) -> Iterator[dict[str, float]]:
    """For every row of a run, its layer's correlations."""
    by_layer = found.layer_correlations()
    for layer, _ in np.ndindex(found.weights_asymmetry.shape):
        yield {f"correlation_{name}": float(by_layer[name][layer]) for name in SHOWN}


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "spread": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0}


def _shown(figure: Mapping[str, float], runs: int) -> str:
    if math.isnan(figure["mean"]):
        return "–"
    return f"{figure['mean']:.3f}" + (f" ± {figure['spread']:.3f}" if runs > 1 else "")
