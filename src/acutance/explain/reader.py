"""Reads one layer while a model runs: which family dominates in each sample, and what HFC/LFC did."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.competitors import competitors, visible_keys
from acutance.explain.corners import corners
from acutance.explain.dominance import Dominance, Outcome, Share
from acutance.explain.spectral_theory import TIE, families
from acutance.explain.statistics import rank_correlation
from acutance.explain.verdict import EXACT_MU, LayerSpectrum
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import Batch, Visitor
from acutance.metrics import check_finite, hfc_lfc_spectral

PLACES = ("branch", "block")


class LayerReader(Visitor):
    """Tallies one layer over batches; holds the layer's input tokens while the layer runs, and a few numbers a sample.

    Args:
        layer: the spectra of H.
        update: what the branch's output goes through before it is added to the residual stream: LayerScale, a norm.
        number: of the layer among all blocks, also those without attention.
        prefix: special tokens `in` or `out` of HFC/LFC.
    """

    def __init__(
        self,
        layer: LayerSpectrum,
        update: Callable[[Tensor], Tensor] = lambda branch: branch,
        number: int = 1,
        prefix: str = "in",
    ) -> None:
        self.needs, self.prefix = dict.fromkeys(("enter", "attend", "leave"), (number,)), prefix
        self.corners = {"heads": corners(layer.heads)}
        whole = layer.whole
        if whole is not None:
            self.corners["whole"] = corners(whole[None])
        # The spectra of several heads say nothing certain of their sum, so they make no prediction.
        self.deciding = "whole" if whole is not None else "heads" if len(layer.heads) == 1 else None
        self.error = {"heads": 0.0, "whole": layer.error}
        self.layer, self.update = layer.layer, update
        self.counted = self.present = TokenLayout()
        self.tokens = self.before = torch.empty(0)
        self.valid: Tensor | None = None  # (samples, tokens), False where there is padding
        self.count = 0
        self.sums: dict[str, Tensor] = {}
        self.mu_error = self.tolerance = 0.0
        self.kept: dict[str, list[Tensor]] = {}  # per sample: the prediction, and what happened

    def begin(self, batch: Batch) -> None:
        """Which of its tokens count for HFC/LFC, and which are there for A."""
        self.counted, self.present = batch.samples(self.prefix), batch.samples("in")
        if self.counted.filled is not None:
            empty = int(self.counted.filled.argmin()) + 1
            raise AcutanceError(f"sample {empty} of a batch has no token that counts: leave it out of the batch")

    def enter(self, layer: int, tokens: Tensor) -> None:
        """The tokens come into the block."""
        self.tokens = tokens

    def attend(self, layer: int, call: AttentionCall) -> None:
        """The attention branch is done: who dominates, and what do the tokens do?"""
        check_finite(call.branch, metric="the attention branch", layer=self.layer)
        self._check(call.A)
        A = self.present.record(call).A
        _, told = self.present.tokens(self.tokens)
        self.valid = visible_keys(A) if told is None else told
        self.before = self._ratio(self.tokens)
        points = {scope: lam.to(A.device) for scope, lam in self.corners.items()}
        others = competitors(A, list(points.values()), self.valid)
        self.mu_error = max(self.mu_error, float(others.residuals.max()))
        self.tolerance = max(self.tolerance, others.tolerance)
        for scope, lam in points.items():
            lean = families(lam, others.values, self.error[scope], others.residuals).leaning
            self._add(f"{scope} smoothing", lean > 0)
            self._add(f"{scope} sharpening", lean < 0)
        if self.deciding is not None:
            # All heads share the constant vector: on constant tokens the layer is exactly I + H. On the others it is
            # I + Σ H_h⊗A_h, and the largest |1 + λμ| over the heads' A_h stands in for its largest eigenvalue.
            lam, mu, off = points[self.deciding], others.values.flatten(1), others.residuals.flatten(1)
            found = families(lam, mu, self.error[self.deciding], off)
            self._keep("lean", found.leaning)
            self._keep("undecided", found.undecided)
            self._keep("predicted", found.log_rate)
        self._keep("mu_min", others.smallest)
        self._keep("mu_largest", others.largest)
        self._compare("branch", self.tokens + self.update(call.branch))

    def leave(self, layer: int, tokens: Tensor) -> None:
        """The tokens leave the block."""
        self._compare("block", tokens)
        self.count += len(self.before)
        self.tokens = self.before = torch.empty(0)

    def result(self) -> Dominance:
        """What was found so far; warns of eigenvalues of A that have not converged."""
        if self.mu_error > self.tolerance:
            warnings.warn(
                f"layer {self.layer}: eigenvalues of A have not converged in a Krylov space, the largest residual is "
                f"{self.mu_error:.1e}, wanted {self.tolerance:.1e}. It is counted as an error of the prediction, and a "
                f"verdict within it is unknown. {EXACT_MU}",
                AcutanceWarning,
                stacklevel=2,
            )
        means = {name: (total / self.count).cpu().numpy() for name, total in self.sums.items()}
        series = {name: torch.cat(parts).cpu().numpy() for name, parts in self.kept.items()}
        lean, predicted, undecided = (series.get(name) for name in ("lean", "predicted", "undecided"))

        def shares(scope: str) -> tuple[Share, ...]:
            pairs = zip(means[f"{scope} smoothing"], means[f"{scope} sharpening"], strict=True)
            return tuple(Share(float(a), float(b)) for a, b in pairs)

        return Dominance(
            samples=self.count,
            mu_min_by_sample=series["mu_min"],
            mu_largest_by_sample=series["mu_largest"],
            mu_error=self.mu_error,
            heads=shares("heads"),
            whole=shares("whole") if "whole" in self.corners else None,
            predicted=None if lean is None else Share(float((lean > 0).mean()), float((lean < 0).mean())),
            undecided=math.nan if undecided is None else float(undecided.mean()),
            predicted_change=math.nan if predicted is None else float(predicted.mean()),
            branch=compare(series["branch"], lean, predicted),
            block=compare(series["block"], lean, predicted),
        )

    def _ratio(self, tokens: Tensor) -> Tensor:
        tokens, mask = self.counted.tokens(tokens)
        if self.valid is not None:
            mask = self.valid if mask is None else mask & self.valid
        return hfc_lfc_spectral(tokens, mask)

    def _check(self, A: AttentionOperator) -> None:
        if A.shape[0] != len(self.tokens) or A.shape[-2:] != (self.tokens.shape[1],) * 2:
            raise AcutanceError(
                f"layer {self.layer}: attention {A.shape} (batch, heads, queries, keys) is not among all tokens of a "
                f"sample, which are {tuple(self.tokens.shape[:2])} (batch, tokens): over windows or merged tokens "
                "I + H⊗A says nothing of them. The weights alone can be explained: explain(model)"
            )

    def _compare(self, place: str, tokens: Tensor) -> None:
        after = self._ratio(tokens)
        change = torch.log(after / self.before)
        self._keep(place, torch.where(after == self.before, 0.0, change))  # 0/0 and ∞/∞ included: nothing changed

    def _add(self, name: str, per_sample: Tensor) -> None:
        total = per_sample.double().sum(0)
        self.sums[name] = total + self.sums[name] if name in self.sums else total

    def _keep(self, name: str, per_sample: Tensor) -> None:
        self.kept.setdefault(name, []).append(per_sample.double())


def compare(
    change: NDArray[np.float64], lean: NDArray[np.float64] | None, predicted: NDArray[np.float64] | None
) -> Outcome:
    """The measured log change of HFC/LFC per sample against the leaning (1 smoothing) and the predicted log change."""
    moved = np.where(np.abs(change) <= TIE, 0, -np.sign(change))  # 1 where it fell
    fell, mean = float((moved > 0).mean()), float(change.mean())
    if lean is None or predicted is None:
        return Outcome(fell, math.nan, mean, math.nan, math.nan, math.nan)
    return Outcome(
        fell=fell,
        agreement=float((moved == lean).mean()),
        change=mean,
        fell_if_smoothing=_share(moved > 0, lean > 0),
        rose_if_sharpening=_share(moved < 0, lean < 0),
        correlation=rank_correlation(predicted, change),
    )


def _share(event: NDArray[np.bool_], given: NDArray[np.bool_]) -> float:
    return float(event[given].mean()) if given.any() else math.nan
