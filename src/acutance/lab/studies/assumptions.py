"""The kernel assumptions of NeuTRENO (https://arxiv.org/abs/2312.00751): symmetric and positive definite. How far off?

Theorem 1 needs the affinity k(x, y) only through k + kᵀ, and takes exp(k_i·k_j/√d) for it, a symmetric positive
definite kernel. A learnt exp(q_i·k_j/√d) is neither by construction. Table 4's alignment says how much that matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn

from acutance import metrics, sites
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import repeat_heads
from acutance.errors import AcutanceError, MissingExtraError
from acutance.explain.statistics import mean_known, rank_correlation
from acutance.lab.studies.affinity import asymmetry, matrix_asymmetry, matrix_negative_share, negative_share, permuted
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import EVERY, Batch, Visitor, walk
from acutance.sites.structure import bare_module, refuse_sharded

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("logits_asymmetry", "logits_negative", "kernel_asymmetry", "kernel_negative")
PERMUTED = tuple(f"{name}_permuted" for name in MEASURES)
# exp(q·k) and permuted entries have no low rank: they need the matrix, of at most so many evenly spaced tokens.
MOST_TOKENS = 512
# What varies less than this is constant up to rounding in float32 (an exactly symmetric kernel), and has no ranks.
ROUNDING = 1e-4


@dataclass(frozen=True)
class KernelAssumptions:
    """Per sample, layer and head, how far the affinities are from what Theorem 1 assumes.

    Asymmetry is ‖S − Sᵀ‖_F / ‖S + Sᵀ‖_F: 0 for a symmetric matrix, about 1 for one without any symmetry. Negative is
    the negative eigenvalues' share in Σ|eigenvalues| of S + Sᵀ: 0 if positive definite, ½ if there is no preference.
    `logits` is S = q kᵀ, `kernel` is exp(S/√d), `weights` is the form W_QᵀW_K by itself (biases, and rotations by
    position, left out). `permuted` is the same entries in random order: what a matrix without any structure gives.

    All are about the affinities as they are before a mask: causality and windows decide which of them a model uses,
    not what they are. Of a causal model no pair of tokens is used both ways; the half that is never used was never
    trained either. The alignment is of the gradients over the pairs that are used.
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

        Negative: the further from the assumption, the worse the alignment. NaN if one of the two does not vary.
        Pooled like this it mixes in how both change with depth; `layer_correlations` does not.
        """
        return {name: _correlation(self.samples[name], self.alignment) for name in MEASURES}

    def layer_correlations(self) -> dict[str, NDArray[np.float64]]:
        """The same within each layer, over samples × heads: (layers,)."""
        return {
            name: np.array([_correlation(*layer) for layer in zip(self.samples[name], self.alignment, strict=True)])
            for name in MEASURES
        }

    def rows(self) -> Iterator[dict[str, float]]:
        """One row per layer and head, means over samples; layers and heads are numbered from 1."""
        means = {name: values.mean(1) for name, values in self.samples.items()}
        means |= {"weights_asymmetry": self.weights_asymmetry, "weights_negative": self.weights_negative}
        for layer, head in np.ndindex(self.weights_asymmetry.shape):
            yield {"layer": layer + 1, "head": head + 1, **{k: float(v[layer, head]) for k, v in means.items()}}

    def to_frame(self) -> pd.DataFrame:
        """One row per layer and head, as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_frame needs pandas: pip install 'acutance[report]'") from error
        return pd.DataFrame(list(self.rows()))

    def table(self) -> Table:
        """The rows for a terminal, permuted entries in brackets, with the correlations below."""
        rows = list(self.rows())
        within = {name: mean_known(values) for name, values in self.layer_correlations().items()}
        found = ", ".join(f"{name} {value:+.2f} ({within[name]:+.2f})" for name, value in self.correlations().items())
        caption = f"mean over samples; rank correlation with alignment, pooled (mean of those within a layer): {found}"
        table = Table(title="kernel assumptions", caption=caption, title_justify="left", caption_justify="left")
        names = [name for name in rows[0] if name not in PERMUTED]
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(_cell(row, name) for name in names))
        return table


@torch.no_grad()
def kernel_assumptions(model: nn.Module, batches: Iterable[Any]) -> KernelAssumptions:
    """How far a model's learnt affinities are from symmetric and from positive definite, per layer and head.

    The order of the permuted entries is random with a fixed seed: the same call gives the same figures.

    Args:
        model: any model `acutance.sites.find` knows, with softmax self-attention, causal or not.
        batches: as for `measure`; padding does not count, and packed documents are samples of their own, refused
            where the model lets them see each other.
    """
    bare = bare_module(model)
    refuse_sharded(bare, "kernel_assumptions")
    reader = AssumptionReader()
    walk(bare, batches, reader)
    if not reader.layers:
        raise AcutanceError("kernel_assumptions got no batches: pass an iterable with at least one")
    layers = [reader.layers[layer] for layer in sorted(reader.layers)]
    samples = {
        name: np.stack([torch.cat(layer[name]).double().cpu().numpy() for layer in layers]) for name in layers[0]
    }
    weights = np.stack([_of_weights(site) for site in sites.find(bare)])
    return KernelAssumptions(samples, weights[:, 0], weights[:, 1])


class AssumptionReader(Visitor):
    """Reads the measures per sample and head at every layer."""

    def __init__(self) -> None:
        self.needs = {"attend": EVERY}
        self.samples = TokenLayout()  # of the batch that runs now
        self.generator = torch.Generator().manual_seed(0)
        self.layers: dict[int, dict[str, list[Tensor]]] = {}

    def begin(self, batch: Batch) -> None:
        """Which tokens count."""
        self.samples = batch.samples("in")

    def attend(self, layer: int, call: AttentionCall) -> None:
        """The affinities of one layer."""
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
    # A token of zeros has logits of zero, which no measure of the logits sees.
    q, k = (x.double() * counts[:, None, :, None] for x in (A.q, repeat_heads(A.k, A.heads)))
    tokens = torch.linspace(0, A.shape[2] - 1, min(A.shape[2], MOST_TOKENS), device=A.device).long()
    logits = q[..., tokens, :] @ k[..., tokens, :].mT * A.scale
    pairs = counts[:, tokens, None] & counts[:, None, tokens]
    shuffled = permuted(logits, pairs, generator)
    kernel, random = (_kernel(x, pairs, A.softcap) for x in (logits, shuffled))
    return {
        "logits_asymmetry": asymmetry(q, k),
        "logits_negative": negative_share(q, k),
        "kernel_asymmetry": matrix_asymmetry(kernel),
        "kernel_negative": matrix_negative_share(kernel),
        "logits_asymmetry_permuted": matrix_asymmetry(shuffled),
        "logits_negative_permuted": matrix_negative_share(shuffled),
        "kernel_asymmetry_permuted": matrix_asymmetry(random),
        "kernel_negative_permuted": matrix_negative_share(random),
        "alignment": metrics.gradient_alignment(A, record.values, counts),
    }


def _kernel(logits: Tensor, pairs: Tensor, softcap: float | None) -> Tensor:
    """exp(logits), divided by its largest entry, which no measure sees; 0, which none sees either, at other pairs."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~pairs.unsqueeze(1), -torch.inf)
    return (logits - logits.amax((-2, -1), keepdim=True)).exp()


def _of_weights(site: sites.AttentionSite) -> NDArray[np.float64]:
    """Asymmetry and negative share (2, heads) of W_QᵀW_K, exact; NaN for a library that keeps them elsewhere."""
    try:
        query, key = site.query_weight().detach(), site.key_weight().detach()
    except AcutanceError:
        return np.full((2, site.heads), np.nan)
    query = query.unflatten(0, (site.heads, site.head_dim))
    key = repeat_heads(key.unflatten(0, (site.kv_heads, site.head_dim))[None], site.heads)[0]  # grouped queries share
    return torch.stack([asymmetry(query.mT, key.mT), negative_share(query.mT, key.mT)]).cpu().numpy()


def _cell(row: Mapping[str, float], name: str) -> str:
    shown = f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name])
    return f"{shown} ({row[f'{name}_permuted']:.3f})" if name in MEASURES else shown


def _correlation(measure: NDArray[np.float64], alignment: NDArray[np.float64]) -> float:
    if min(np.ptp(measure), np.ptp(alignment)) < ROUNDING:
        return float("nan")
    return rank_correlation(measure.ravel(), alignment.ravel())


def _check(A: AttentionOperator, layer: int) -> None:
    if A.kernel not in ("softmax", "symmetric") or A.shape[2] != A.shape[3]:
        raise AcutanceError(f"layer {layer}: {A!r}: the assumptions are about softmax self-attention")
    if A.mask is not None and A.mask.is_floating_point():
        adds = (A.mask != 0) & (A.mask > torch.finfo(A.mask.dtype).min / 2)  # eager masks are 0 and the lowest number
        if adds.any():
            raise AcutanceError(
                f"layer {layer}: {A!r}: a bias is added to q·k, and the affinities q·k alone are not this layer's"
            )
