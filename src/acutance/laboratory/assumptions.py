"""The kernel assumptions of NeuTRENO (https://arxiv.org/abs/2312.00751): symmetric and positive definite. How far off?

Theorem 1 needs the affinity k(x, y) only through k + kᵀ, and takes exp(k_i·k_j/√d) for it, a symmetric positive
definite kernel. A learnt exp(q_i·k_j/√d) is neither by construction. Table 4's alignment says how much that matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn

from acutance import metrics, sites
from acutance.errors import AcutanceError, MissingExtraError
from acutance.kernels.heads import repeat_heads
from acutance.measure import evaluating, feed
from acutance.operator import AttentionOperator, AttentionRecord
from acutance.statistics import mean_known, rank_correlation

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("logits_asymmetry", "logits_negative", "kernel_asymmetry", "kernel_negative")
# exp(q·k) has no low rank: its spectrum needs the matrix, of at most so many evenly spaced tokens.
MOST_TOKENS = 512
# What varies less than this is constant up to rounding in float32 (an exactly symmetric kernel), and has no ranks.
ROUNDING = 1e-4


@dataclass(frozen=True)
class KernelAssumptions:
    """Per sample, layer and head, how far the affinities are from what Theorem 1 assumes.

    Asymmetry is ‖S − Sᵀ‖_F / ‖S + Sᵀ‖_F: 0 for a symmetric matrix, about 1 for one without any symmetry. Negative is
    the negative eigenvalues' share in Σ|eigenvalues| of S + Sᵀ: 0 if positive definite, ½ if there is no preference.
    `logits` is S = q kᵀ, `kernel` is exp(S/√d), `weights` is the form W_QᵀW_K by itself (biases left out).
    """

    samples: dict[str, NDArray[np.float64]]  # MEASURES and alignment, each (layers, samples, heads)
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
        """The rows for a terminal, with the correlations below."""
        rows = list(self.rows())
        within = {name: mean_known(values) for name, values in self.layer_correlations().items()}
        found = ", ".join(f"{name} {value:+.2f} ({within[name]:+.2f})" for name, value in self.correlations().items())
        caption = f"mean over samples; rank correlation with alignment, pooled (mean of those within a layer): {found}"
        table = Table(title="kernel assumptions", caption=caption, title_justify="left", caption_justify="left")
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
        return table


@torch.no_grad()
def kernel_assumptions(model: nn.Module, batches: Iterable[Any]) -> KernelAssumptions:
    """How far a model's learnt affinities are from symmetric and from positive definite, per layer and head.

    Args:
        model: any model `acutance.sites.find` knows, with softmax self-attention, neither causal nor masked.
        batches: as for `measure`.
    """
    bare = getattr(model, "_orig_mod", model)
    found = sites.find(bare)
    collected: list[dict[str, list[Tensor]]] = [{} for _ in found]
    with evaluating(bare), ExitStack() as stack:
        for site, into in zip(found, collected, strict=True):
            stack.enter_context(site.observe(partial(_collect, into, site.layer)))
        for batch in batches:
            feed(bare, batch)
    if not collected[0]:
        raise AcutanceError("kernel_assumptions got no batches: pass an iterable with at least one")
    samples = {
        name: np.stack([torch.cat(layer[name]).double().cpu().numpy() for layer in collected]) for name in collected[0]
    }
    weights = np.stack([_of_weights(site) for site in found])
    return KernelAssumptions(samples, weights[:, 0], weights[:, 1])


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


def _collect(into: dict[str, list[Tensor]], layer: int, record: AttentionRecord) -> None:
    A = record.operator
    _check(A, layer)
    q, k = A.q.double(), repeat_heads(A.k, A.heads).double()
    kernel = _affinity(q, k, A.scale)
    readings = {
        "logits_asymmetry": asymmetry(q, k),
        "logits_negative": negative_share(q, k),
        "kernel_asymmetry": _norm(kernel - kernel.mT) / _norm(kernel + kernel.mT),
        "kernel_negative": _negative(torch.linalg.eigvalsh(kernel + kernel.mT)),
        "alignment": metrics.gradient_alignment(A, record.values),
    }
    for name, values in readings.items():
        into.setdefault(name, []).append(values)


def _affinity(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """exp(s q·k) of evenly spaced tokens, divided by its largest entry: every measure here is blind to a factor."""
    tokens = torch.linspace(0, q.shape[-2] - 1, min(q.shape[-2], MOST_TOKENS), device=q.device).long()
    logits = q[..., tokens, :] @ k[..., tokens, :].mT * scale
    return (logits - logits.amax((-2, -1), keepdim=True)).exp()


def _negative(eigenvalues: Tensor) -> Tensor:
    size = eigenvalues.abs()
    # What rounding makes of zeros is no negative mass.
    negative = (eigenvalues < -1e-12 * size.amax(-1, keepdim=True)) * size
    return negative.sum(-1) / size.sum(-1)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norm


def _of_weights(site: sites.AttentionSite) -> NDArray[np.float64]:
    """Asymmetry and negative share (2, heads) of W_QᵀW_K, exact; NaN for a library that keeps them elsewhere."""
    try:
        query, key = site.query_weight().detach(), site.key_weight().detach()
    except AcutanceError:
        return np.full((2, site.heads), np.nan)
    query = query.unflatten(0, (site.heads, site.head_dim))
    key = repeat_heads(key.unflatten(0, (site.kv_heads, site.head_dim))[None], site.heads)[0]  # grouped queries share
    return torch.stack([asymmetry(query.mT, key.mT), negative_share(query.mT, key.mT)]).cpu().numpy()


def _correlation(measure: NDArray[np.float64], alignment: NDArray[np.float64]) -> float:
    if min(np.ptp(measure), np.ptp(alignment)) < ROUNDING:
        return float("nan")
    return rank_correlation(measure.ravel(), alignment.ravel())


def _check(A: AttentionOperator, layer: int) -> None:
    if A.kernel not in ("softmax", "symmetric") or A.causal or A.mask is not None:
        raise AcutanceError(
            f"layer {layer}: {A!r}: the assumptions are about softmax self-attention without causal or other masks, "
            "where the affinities of two tokens can be compared both ways"
        )
