"""Are learnt affinities a symmetric positive definite kernel, as NeuTRENO (https://arxiv.org/abs/2312.00751) assumes?

Theorem 1 depends on the affinity k(x, y) only through k + kᵀ, and assumes exp(k_i·k_j/√d), a symmetric positive
definite kernel. A learnt exp(q_i·k_j/√d) need be neither. Table 4's alignment says how much that matters.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance import metrics, sites
from acutance.attention import AttentionCall
from acutance.attention.operator import HIDDEN, AttentionOperator
from acutance.attention.products import repeat_heads
from acutance.errors import AcutanceError, require_finite
from acutance.explain.spectral_theory import rank_correlation
from acutance.io import LoadedModel, load_model
from acutance.lab.data import digits
from acutance.lab.studies.pictures import kernel_picture, save_study
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import EVERY, Batch, Visitor, describe, walk
from acutance.report.pictures import Figure
from acutance.report.tables import DataFrame, FittedTable, data_frame
from acutance.sites.structure import bare_module, refuse_sharded

MEASURES = ("logits_asymmetry", "logits_negative", "kernel_asymmetry", "kernel_negative")
PERMUTED = tuple(f"{name}_permuted" for name in MEASURES)
# exp(q·k) and permuted entries have no low rank, so they need the matrix, of at most this many evenly spaced tokens.
MOST_TOKENS = 512
# Values that vary less are constant up to rounding in float32 (an exactly symmetric kernel), and have no ranks.
ROUNDING = 1e-4
# Table 4's alignment by the model's attention, on training and on test images of ImageNet.
PAPER: Mapping[str, Mapping[str, float]] = {
    "softmax": {"train": 0.973, "test": 0.964},
    "symmetric": {"train": 0.982, "test": 0.976},
}
BATCH, TEXT_BATCH = 64, 4
SHOWN = ("kernel_asymmetry", "kernel_negative")
WEIGHTS = ("weights_asymmetry", "weights_negative")
# The rows of the table, and their keys in a row of `KernelStudy.summary`.
FIGURES = {
    "alignment": ("alignment",),
    "asymmetry of exp(q·k/√d)": ("kernel_asymmetry",),
    "… with its entries permuted": ("kernel_asymmetry_permuted",),
    "negative share of exp(q·k/√d)": ("kernel_negative",),
    "… with them permuted": ("kernel_negative_permuted",),
    "asymmetry of W_QᵀW_K": ("weights_asymmetry",),
    "negative share of W_QᵀW_K": ("weights_negative",),
    "ρ asymmetry, pooled": ("pooled", "kernel_asymmetry"),
    "ρ asymmetry, within a layer": ("within", "kernel_asymmetry"),
    "ρ negative share, pooled": ("pooled", "kernel_negative"),
    "ρ negative share, within a layer": ("within", "kernel_negative"),
}


def asymmetry(left: Tensor, right: Tensor) -> Tensor:
    """‖S − Sᵀ‖_F / ‖S + Sᵀ‖_F of S = left @ rightᵀ (..., N, D), in O(N D²): S is never formed.

    ‖S ± Sᵀ‖² = 2‖S‖² ± 2 tr(S S), with ‖S‖² = tr(LᵀL RᵀR) and tr(S S) = tr(RᵀL RᵀL).
    """
    left, right = left.double(), right.double()
    size = ((left.mT @ left) * (right.mT @ right)).sum((-2, -1))
    mixed = right.mT @ left
    turned = (mixed * mixed.mT).sum((-2, -1))
    return ((size - turned).clamp_min(0) / (size + turned).clamp_min(0)).sqrt()


def negative_share(left: Tensor, right: Tensor) -> Tensor:
    """The negative eigenvalues' share in Σ|eigenvalues| of S + Sᵀ, S = left @ rightᵀ (..., N, D), in O(N D²).

    S + Sᵀ = F M Fᵀ with F = [left right] and M swapping the halves; its eigenvalues other than 0 are those of
    G^½ M G^½ with the Gram matrix G = FᵀF, 2D × 2D.
    """
    both = torch.cat([left, right], dim=-1).double()
    values, vectors = torch.linalg.eigh(both.mT @ both)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    swapped = root.roll(left.shape[-1], dims=-2)
    return _negative(torch.linalg.eigvalsh(root @ swapped))


def permuted(S: Tensor, pairs: Tensor, generator: torch.Generator) -> Tensor:
    """S (samples, heads, N, N) with its entries in random order. A measure of it shows what chance gives.

    The entries marked in `pairs` (samples, N, N) are permuted among themselves. The others must all be equal, and stay.
    Heads of a sample share the order. The generator is on the CPU.
    """
    inside, entries = pairs.flatten(-2), S.flatten(-2)
    noise = torch.rand(inside.shape, generator=generator).to(S.device)
    drawn = (noise + ~inside).argsort(-1)  # the marked entries first, in random order
    places = (~inside).byte().argsort(dim=-1, stable=True)  # the same entries in their own order
    drawn, places = (index.unsqueeze(1).expand_as(entries) for index in (drawn, places))
    return torch.empty_like(entries).scatter(-1, places, entries.gather(-1, drawn)).view_as(S)


def _negative(eigenvalues: Tensor) -> Tensor:
    size = eigenvalues.abs()
    # Zeros that are negative by rounding do not count.
    negative = (eigenvalues < -1e-12 * size.amax(-1, keepdim=True)) * size
    return negative.sum(-1) / size.sum(-1)


@dataclass(frozen=True)
class KernelAssumptions:
    """Per sample, layer and head, how far the affinities are from what Theorem 1 assumes.

    Asymmetry is ‖S − Sᵀ‖_F / ‖S + Sᵀ‖_F: 0 for a symmetric matrix, about 1 for one without symmetry. Negative is the
    negative eigenvalues' share in Σ|eigenvalues| of S + Sᵀ: 0 if positive definite, ½ without a preferred sign.
    `logits` is S = q kᵀ, `kernel` is exp(S/√d), and `weights` is the form W_QᵀW_K without biases or rotary positions.
    `permuted` has the same entries in random order, as a matrix without structure.

    All of these describe the affinities before a mask. A causal model never uses or trains half of them. The alignment
    compares the gradients over the pairs that are used.
    """

    samples: dict[str, NDArray[np.float64]]  # MEASURES, PERMUTED and alignment, each (layers, samples, heads)
    weights_asymmetry: NDArray[np.float64]  # (layers, heads); NaN where W_Q and W_K cannot be read
    weights_negative: NDArray[np.float64]

    @property
    def alignment(self) -> NDArray[np.float64]:
        """Table 4's cosine between the two gradients, (layers, samples, heads)."""
        return self.samples["alignment"]

    def correlations(self) -> dict[str, float]:
        """Spearman's rank correlation of every measure with the alignment, over layers × samples × heads.

        Negative means: the further from the assumption, the worse the alignment. NaN if one of the two does not vary.
        The pooled correlation also includes how both change with depth; `layer_correlations` does not.
        """
        return {name: _correlation(self.samples[name], self.alignment) for name in MEASURES}

    def layer_correlations(self) -> dict[str, NDArray[np.float64]]:
        """The same within each layer, over samples × heads: (layers,)."""
        pairs = {name: zip(self.samples[name], self.alignment, strict=True) for name in MEASURES}
        return {name: np.array([_correlation(*layer) for layer in layers]) for name, layers in pairs.items()}

    def rows(self) -> Iterator[dict[str, float]]:
        """One row per layer and head with means over samples. Layers and heads are numbered from 1."""
        means = {name: values.mean(1) for name, values in self.samples.items()}
        means |= {name: getattr(self, name) for name in WEIGHTS}
        for layer, head in np.ndindex(self.weights_asymmetry.shape):
            yield {"layer": layer + 1, "head": head + 1, **{k: float(v[layer, head]) for k, v in means.items()}}

    def to_frame(self) -> DataFrame:
        return data_frame([*self.rows()])


@torch.no_grad()
def kernel_assumptions(model: nn.Module, batches: Iterable[Any], *, progress: str | None = None) -> KernelAssumptions:
    """How far a model's learnt affinities are from symmetric and from positive definite, per layer and head.

    The model may be any that `acutance.sites.find` knows, with softmax self-attention, causal or not. Batches are as
    for `measure`. Padding does not count. Packed documents are separate samples, and refused if the model lets them see
    each other. Entries are permuted with a fixed seed, so the same call gives the same figures. `progress` is the title
    of a progress bar.
    """
    bare = bare_module(model)
    refuse_sharded(bare, "kernel_assumptions")
    reader = AssumptionReader()
    walk(bare, batches, reader, progress=progress)
    if not reader.layers:
        raise AcutanceError("kernel_assumptions got no batches: pass an iterable with at least one")
    layers = [reader.layers[layer] for layer in sorted(reader.layers)]
    samples = {name: np.stack([torch.cat(each[name]).double().cpu().numpy() for each in layers]) for name in layers[0]}
    weights = np.stack([_of_weights(site) for site in sites.find(bare)])
    return KernelAssumptions(samples, weights[:, 0], weights[:, 1])


class AssumptionReader(Visitor):
    """Reads the measures per sample and head at every layer."""

    def __init__(self) -> None:
        self.needs = {"attend": EVERY}
        self.samples = TokenLayout()  # of the current batch
        self.generator = torch.Generator().manual_seed(0)
        self.layers: dict[int, dict[str, list[Tensor]]] = {}

    def begin(self, batch: Batch) -> None:
        self.samples = batch.samples("in").refuse_empty()

    def attend(self, layer: int, call: AttentionCall) -> None:
        into = self.layers.setdefault(layer, {})
        for name, values in _measures(call, self.samples, self.generator).items():
            into.setdefault(name, []).append(values)


def _measures(record: AttentionCall, samples: TokenLayout, generator: torch.Generator) -> dict[str, Tensor]:
    _, counts = samples.tokens(record.branch)
    record = samples.record(record)
    A = record.A
    _check(A, record.layer)
    if counts is None:
        counts = torch.ones(1, 1, dtype=torch.bool, device=A.device)
    counts = counts.expand(A.shape[0], A.shape[2])
    # A token of zeros has zero logits, which do not affect any measure of the logits.
    q, k = (
        require_finite(x.double() * counts[:, None, :, None], f"layer {record.layer}: {name}")
        for x, name in ((A.q, "q"), (repeat_heads(A.k, A.heads), "k"))
    )
    tokens = torch.linspace(0, A.shape[2] - 1, min(A.shape[2], MOST_TOKENS), device=A.device).long()
    logits = q[..., tokens, :] @ k[..., tokens, :].mT * A.scale
    pairs = counts[:, tokens, None] & counts[:, None, tokens]
    shuffled = permuted(logits, pairs, generator)
    kernel, random = (_kernel(x, pairs, A.softcap) for x in (logits, shuffled))
    found = {"logits_asymmetry": asymmetry(q, k), "logits_negative": negative_share(q, k)}
    for of, ending, S in (("kernel", "", kernel), ("logits", "_permuted", shuffled), ("kernel", "_permuted", random)):
        twice = require_finite(S + S.mT, f"layer {record.layer}: S + Sᵀ")
        found[f"{of}_asymmetry{ending}"] = torch.linalg.matrix_norm(S - S.mT) / torch.linalg.matrix_norm(twice)
        found[f"{of}_negative{ending}"] = _negative(torch.linalg.eigvalsh(twice))
    return found | {"alignment": metrics.gradient_alignment(A, record.values, counts)}


def _kernel(logits: Tensor, pairs: Tensor, softcap: float | None) -> Tensor:
    """exp(logits) divided by its largest entry, and 0 at pairs that do not count. Neither affects any measure."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~pairs.unsqueeze(1), -torch.inf)
    return (logits - logits.amax((-2, -1), keepdim=True)).exp()


def _of_weights(site: sites.AttentionSite) -> NDArray[np.float64]:
    """Asymmetry and negative share (2, heads) of W_QᵀW_K, exact; NaN if W_Q and W_K cannot be read."""
    try:
        query, key = site.query_weight().detach(), site.key_weight().detach()
    except AcutanceError:
        return np.full((2, site.heads), np.nan)
    for weight, name in ((query, "W_Q"), (key, "W_K")):
        require_finite(weight, f"layer {site.layer}: {name}")
    query = query.unflatten(0, (site.heads, site.head_dim))
    key = repeat_heads(key.unflatten(0, (site.kv_heads, site.head_dim))[None], site.heads)[0]  # grouped queries share
    return torch.stack([asymmetry(query.mT, key.mT), negative_share(query.mT, key.mT)]).cpu().numpy()


def _correlation(measure: NDArray[np.float64], alignment: NDArray[np.float64]) -> float:
    if min(np.ptp(measure), np.ptp(alignment)) < ROUNDING:
        return float("nan")
    return rank_correlation(measure.ravel(), alignment.ravel())


def _check(A: AttentionOperator, layer: int) -> None:
    if A.kernel not in ("softmax", "symmetric") or A.shape[2] != A.shape[3]:
        raise AcutanceError(f"layer {layer}: {A!r}: the assumptions are about softmax self-attention")
    if A.mask is not None and A.mask.is_floating_point():
        adds = (A.mask != 0) & (A.mask > HIDDEN)  # eager masks are 0 and the lowest number
        if adds.any():
            raise AcutanceError(f"layer {layer}: {A!r}: a bias is added to q·k, so q·k alone is not the affinity")


@dataclass(frozen=True)
class KernelStudy:
    """Results of `kernel_assumptions`, by run and by data (train and test images, or the name of a text).

    Runs whose names differ only in a final `-seed0`, `-seed1`, … are one variant. Its figures are means over runs with
    their spread (standard deviation).
    """

    runs: Mapping[tuple[str, str], KernelAssumptions]
    samples: Mapping[str, int]  # images or windows of text read, by data
    versions: Mapping[str, str]

    def to_frame(self) -> DataFrame:
        """One row per run, data, layer and head with the measures and the alignment, as means over samples."""
        rows = []
        for (run, data), found in self.runs.items():
            by_layer = found.layer_correlations()
            for row in found.rows():
                within = {f"correlation_{name}": float(by_layer[name][int(row["layer"]) - 1]) for name in SHOWN}
                rows.append({"variant": variant_of(run), "run": run, "data": data, **row, **within})
        return data_frame(rows)

    def summary(self) -> list[dict[str, Any]]:
        """One row per variant and data with every figure's mean and spread over runs.

        `pooled` is the rank correlation with the alignment over layers × samples × heads. `within` is the mean over
        layers of the correlation over samples × heads.
        """
        groups: dict[tuple[str, str], list[KernelAssumptions]] = {}
        for (run, data), found in self.runs.items():
            groups.setdefault((variant_of(run), data), []).append(found)
        return [
            {"variant": variant, "data": data, "runs": len(group)}
            | {name: _spread([float(f.samples[name].mean()) for f in group]) for name in group[0].samples}
            | {name: _spread([_known_mean(getattr(f, name)) for f in group]) for name in WEIGHTS}
            | {
                "pooled": {name: _spread([f.correlations()[name] for f in group]) for name in MEASURES},
                "within": {name: _spread([_known_mean(f.layer_correlations()[name]) for f in group]) for name in SHOWN},
            }
            for (variant, data), group in groups.items()
        ]

    def table(self) -> FittedTable:
        """A column per variant: alignment, distance of exp(q·k/√d) from the assumptions, and their correlation."""
        paper = "; ".join(f"{name} {row['train']} train, {row['test']} test" for name, row in PAPER.items())
        caption = f"mean ± spread over runs; ρ: rank correlation with alignment. Table 4 (DeiT, ImageNet): {paper}"
        rows = {(data, name): {"data": data, "": name} for data in self.samples for name in FIGURES}
        for found in self.summary():
            column = f"{found['variant']}, {found['runs']} run{'s' * (found['runs'] > 1)}"
            for name, path in FIGURES.items():
                rows[found["data"], name][column] = _shown(found, path)
        keys = ("data", "")
        return FittedTable("kernel assumptions of trained models", [*rows.values()], caption, keys=keys, left=keys)

    def picture(self) -> Figure:
        return kernel_picture(self.to_frame())

    def save(self, folder: str | os.PathLike[str], *, context: Mapping[str, Any] | None = None) -> list[Path]:
        """Write kernel.csv, kernel.json, kernel.png and kernel.svg."""
        found = {"versions": self.versions, "samples": self.samples, "paper": PAPER, "summary": self.summary()}
        return save_study(folder, "kernel", self.to_frame(), {**(context or {}), **found}, self.picture())


def kernel_study(
    models: Mapping[str, Callable[[], nn.Module | LoadedModel]],
    *,
    samples: int = 1000,
    text: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    progress: bool = True,
) -> KernelStudy:
    """Measure every model on evenly spaced training and test images of the embedded digits, or on a text.

    Models, by the name of their run, are loaded one at a time. Text (a file or folder, in windows of `tokens`) needs
    models from `acutance.io.loading.load_model`. `samples` counts images of each split (Table 4 has 1000) or windows.
    """
    if not models:
        raise AcutanceError("kernel_study got no models: name at least one run")
    runs, versions, counts = {}, {}, {}
    for run, load in models.items():
        loaded = load()
        model = loaded.model if isinstance(loaded, LoadedModel) else loaded
        versions = describe(model)["versions"]
        if text is None:
            data: Mapping[str, Sequence[Any]] = _digit_batches(samples)
        elif isinstance(loaded, LoadedModel):
            windows = loaded.text_batches(Path(text), tokens=tokens, batch=TEXT_BATCH, limit=samples)
            data = {Path(text).name: windows}
        else:
            bare = f"a bare {type(loaded).__name__}, without the tokenizer that reads text"
            raise AcutanceError(f'kernel_study got {bare}: give lambda: load_model("hf:…") of acutance.io.loading')
        for name, batches in data.items():
            title = f"{run}, {name}" if progress else None
            runs[run, name] = kernel_assumptions(model, batches, progress=title)
            counts[name] = runs[run, name].alignment.shape[1]
    return KernelStudy(runs, counts, versions)


def models_of(runs: Sequence[str]) -> dict[str, Callable[[], LoadedModel]]:
    """Loaders by the name of a folder or checkpoint (without its ending); model.safetensors by its folder's name."""
    paths = [Path(run.removeprefix("hf:").removeprefix("timm:")) for run in runs]
    names = [p.parent.name if p.name == "model.safetensors" else p.name.removesuffix(".safetensors") for p in paths]
    if len(set(names)) < len(names):
        raise AcutanceError(f"two of these runs have the same name: {', '.join(names)}. Rename one of them")
    return {name: partial(load_model, run) for name, run in zip(names, runs, strict=True)}


def variant_of(run: str) -> str:
    """The run's name without its seed."""
    return re.sub(r"-seed\d+$", "", run)


def _digit_batches(samples: int) -> dict[str, Sequence[Tensor]]:
    found = dict(zip(("train", "test"), digits(), strict=True))
    spaced = {name: torch.linspace(0, len(of) - 1, min(samples, len(of))).round().long() for name, of in found.items()}
    return {name: split.images[spaced[name]].split(BATCH) for name, split in found.items()}


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "spread": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0}


def _shown(row: Mapping[str, Any], path: Sequence[str]) -> str:
    figure: Any = reduce(getitem, path, row)
    if math.isnan(figure["mean"]):
        return "–"
    return f"{figure['mean']:.3f}" + (f" ± {figure['spread']:.3f}" if row["runs"] > 1 else "")


def _known_mean(values: NDArray[np.float64]) -> float:  # of the entries that are not NaN
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))
