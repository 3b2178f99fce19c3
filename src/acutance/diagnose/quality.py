"""Quality: how well a model does its work, with a 95 % interval, so that smoothness never stands alone.

What can be measured follows from the model and its batches: accuracy and cross-entropy where there are labels,
perplexity where the next token is predicted, the loss of masked tokens, the model's own loss, or a user's function.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import AcutanceError, NonFiniteError
from acutance.measure.intervals import student
from acutance.measure.samples import SPECIAL, Fed, fed_of, refuse_single
from acutance.measure.walk import feed
from acutance.models import LanguageModel
from acutance.sites.structure import evaluating

NOT_MEASURED = "quality not measured: there is no label and no loss; give batches of (inputs, labels), or a function"
IGNORED = -100  # as a label: not counted
MASKED = 0.15  # share of a text's tokens that a masked language model has to guess, drawn with a seed
PERCENT = 100.0


@dataclass(frozen=True)
class Change:
    """How a quality changed on the same samples; `value` is a factor of perplexity, else a difference."""

    value: float
    low: float  # of the interval; NaN for one sample
    high: float
    neutral: float  # what no change would be
    higher_is_better: bool

    @property
    def verdict(self) -> str:
        """Better or worse, if the interval does not hold "no change"."""
        if math.isnan(self.low) or self.low <= self.neutral <= self.high:
            return "no clear change"
        return "better" if (self.value > self.neutral) == self.higher_is_better else "worse"

    def __str__(self) -> str:
        value, low, high = (f"×{x:,.4g}" if self.neutral else f"{x:+.3g}" for x in (self.value, self.low, self.high))
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Quality:
    """One quality of one model: a value per sample, and how much each sample weighs (its tokens, or 1)."""

    name: str  # perplexity holds losses; its mean is their exponential
    higher_is_better: bool
    values: tuple[float, ...]
    weights: tuple[float, ...]
    about: str = ""  # how it was measured

    @property
    def mean(self) -> float:
        return self._shown(float(np.average(self.values, weights=self.weights)))

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Where the mean over all such samples probably lies, by Student's t; NaN for one sample."""
        extra = [0.0, 0.0, PERCENT, PERCENT] if self._counts_hits else []  # as Agresti and Coull: no 100 ± 0 %
        low, high = _interval(np.array(self.values), np.array(self.weights), level, extra, 1.0)
        return self._shown(low), self._shown(high)

    def change(self, other: Self, level: float = 0.95) -> Change:
        """From this to the other, paired: both were measured on the same samples."""
        if (self.name, self.weights) != (other.name, other.weights):
            told = [f"{one.name} of {len(one.values)} samples" for one in (self, other)]
            raise AcutanceError(f"{told[0]} and {told[1]} are not paired: measure both on the same batches")
        differences, weights = np.subtract(other.values, self.values), np.array(self.weights)
        extra = [PERCENT, 0.0, 0.0, -PERCENT] if self._counts_hits else []  # as Agresti and Min
        low, high = _interval(differences, weights, level, extra, 0.5)
        value = float(np.average(differences, weights=weights))
        value, low, high = map(self._shown, (value, low, high))
        return Change(value, low, high, self._shown(0.0), self.higher_is_better)

    def to(self, other: Self) -> str:
        """For example: perplexity 66.0 → 9,483, ×143.7 (×130.2 to ×158.6)."""
        return f"{self.name} {self.mean:,.4g} → {other.mean:,.4g}{self._unit}, {self.change(other)}"

    @property
    def _counts_hits(self) -> bool:
        return self.name == "accuracy" and {*self.values} <= {0.0, PERCENT}

    @property
    def _unit(self) -> str:
        return " %" if self.name == "accuracy" else ""

    def _shown(self, value: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(value)) if self.name == "perplexity" else value

    def __str__(self) -> str:
        low, high = self.interval()
        between = "" if math.isnan(low) else f" (95 %: {low:,.4g} to {high:,.4g})"
        return f"{self.name} {self.mean:,.4g}{self._unit}{between}"


def _interval(
    values: NDArray[np.float64], weights: NDArray[np.float64], level: float, extra: Sequence[float], count: float
) -> tuple[float, float]:
    """Of a weighted mean; the `extra` values each count as so many samples."""
    if (n := len(values)) < 2:
        return math.nan, math.nan
    squares = np.r_[weights**2, [count] * len(extra)]
    values, weights = np.r_[values, extra], np.r_[weights, [count] * len(extra)]
    middle = float(np.average(values, weights=weights))
    error = math.sqrt(n / (n - 1) * float(squares @ (values - middle) ** 2)) / float(weights.sum())
    half = student(n - 1, level) * error
    return middle - half, middle + half


@dataclass(frozen=True)
class Score:
    """What one batch says: the mean loss of each sample, how much it weighs, and its share of hits in percent."""

    loss: Tensor
    weights: Tensor
    hits: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """What a model is judged by, its headline first, and the loss that fine-tuning lowers."""

    names: tuple[str, ...]
    score: Callable[[nn.Module, Any, int], Score]  # of a batch, whose number seeds what is masked
    about: str = ""
    higher_is_better: bool = False  # of a user's function; of all others the name says it

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> list[Quality]:
        """The qualities over all samples, in evaluation mode; samples with nothing to predict are left out."""
        with evaluating(model):
            scores = [self.score(model, batch, number) for number, batch in enumerate(batches)]
        weights, found = torch.cat([one.weights for one in scores]).double().cpu(), []
        for name in self.names:
            parts = [one.loss if name != "accuracy" or one.hits is None else one.hits for one in scores]
            values = torch.cat(parts).double().cpu()[weights > 0]
            if not bool(values.isfinite().all()):
                raise NonFiniteError(f"the {name} is not finite")
            kept, higher = weights[weights > 0].tolist(), name == "accuracy" or self.higher_is_better
            found.append(Quality(name, higher, tuple(values.tolist()), tuple(kept), self.about))
        return found


def objective_of(model: nn.Module, batches: Sequence[Any], quality: Any = None) -> Objective | None:
    """What the model can be judged by on these batches; None if there is no label and no loss.

    `quality` is the name of one of those that can be measured, a function of (model, batch) or its place,
    `module:function`. A function gives a value for each sample, or one for the batch. Higher is better, unless it has
    an attribute `higher_is_better` that is false.
    """
    refuse_single(batches)
    if callable(quality) or (isinstance(quality, str) and ":" in quality):
        return _by_function(quality)
    if not len(batches):
        raise AcutanceError("there is no batch to measure quality on")
    with evaluating(model):
        found = _find(model, batches[0], getattr(batches, "mask_token", None))
    if quality is None or (found is not None and quality in found.names):
        return found and replace(found, names=tuple(sorted(found.names, key=lambda name: name != quality)))
    raise AcutanceError(
        f"quality {quality!r} cannot be measured here: {', '.join(found.names) if found else 'none'} can"
    )


def measure_quality(model: nn.Module, batches: Sequence[Any], quality: Any = None) -> list[Quality]:
    """The qualities of a model, the headline first; none where there is no label and no loss."""
    objective = objective_of(model, batches, quality)
    return [] if objective is None else objective.measure(model, batches)


def _by_function(quality: Any) -> Objective:
    try:
        function = resolve_name(quality) if isinstance(quality, str) else quality
    except (ImportError, AttributeError, ValueError) as error:
        raise AcutanceError(f"quality {quality!r} is no module:function that can be imported: {error}") from error

    def score(model: nn.Module, batch: Any, number: int) -> Score:
        values = torch.as_tensor(function(model, batch)).reshape(-1)
        return Score(values, torch.ones(len(values)))

    name, higher = getattr(function, "__name__", "quality"), getattr(function, "higher_is_better", True)
    return Objective((name,), score, "", higher)


def _find(model: nn.Module, batch: Any, mask_token: int | None) -> Objective | None:
    if isinstance(model, LanguageModel):
        return Objective(("perplexity", "loss"), _own_words, "of the next word")
    fed, labels = fed_of(batch), labels_of(batch)
    logits, loss = _outputs(feed(model, fed))
    if logits is not None and logits.ndim != 3 and _are_classes(labels, logits):
        return Objective(("accuracy", "cross-entropy"), _classes)
    ids = ids_of(fed)
    is_decoder = isinstance(fed, Mapping) and "decoder_input_ids" in fed  # which reads a text of its own
    if logits is not None and ids is not None and logits.shape[:-1] == ids.shape and not is_decoder:
        if _is_causal(model, fed, logits):
            return Objective(("perplexity", "loss"), _next_tokens, "of the next token")
        if mask_token is not None and labels is None:
            about = f"of {MASKED:.0%} of the tokens, masked, always the same"
            return Objective(("masked-token loss",), partial(_masked_tokens, mask_token=mask_token), about)
    if logits is not None and logits.ndim == 3 and _are_classes(labels, logits.mT):
        return Objective(("accuracy", "cross-entropy"), _classes, "of labelled tokens")
    return None if loss is None else Objective(("loss",), _own_loss, "the model's own, of a batch")


def labels_of(batch: Any) -> Tensor | None:
    """The second entry of a tuple, or what a mapping calls labels; None unless they are whole numbers."""
    found = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.dtype in (torch.int64, torch.int32, torch.uint8) else None


def ids_of(fed: Fed) -> Tensor | None:
    """The tokens of a text, by their numbers."""
    found = fed.get("input_ids") if isinstance(fed, Mapping) else fed
    return found if isinstance(found, Tensor) and not found.is_floating_point() and found.ndim == 2 else None


def _feed_ids(model: nn.Module, fed: Fed, ids: Tensor) -> Tensor:
    """The scores of a text, of which only the loss is not computed again."""
    others = {name: x for name, x in fed.items() if name != "labels"} if isinstance(fed, Mapping) else None
    return _outputs(feed(model, ids if others is None else others | {"input_ids": ids}))[0]  # type: ignore[return-value]


def _outputs(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scores and the loss among what a model returns."""
    if isinstance(output, (tuple, list)):
        output = output[0]
    if isinstance(output, Tensor):
        return (output, None) if output.ndim else (None, output)
    told = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
    found = [told.get(name) for name in ("logits", "loss")]
    return tuple(x if isinstance(x, Tensor) else None for x in found)  # type: ignore[return-value]


def _are_classes(labels: Tensor | None, logits: Tensor) -> bool:
    shape = (len(logits), *logits.shape[2:])
    return labels is not None and labels.shape == shape and int(labels.max()) < logits.shape[1]


def _is_causal(model: nn.Module, fed: Fed, logits: Tensor) -> bool:
    """Whether scores of the first sample stay when its last token changes; they must be of the model's vocabulary."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    if not isinstance(fed, Mapping) and logits.shape[-1] not in sizes:  # features, not scores
        return False
    ids: Any = ids_of(fed)
    other, last = ids.clone(), int(_content(fed)[0].nonzero().max())
    other[0, last] = (other[0, last] + 1) % logits.shape[-1]
    first, second = logits[0, :last], _feed_ids(model, fed, other)[0, :last]
    return last > 0 and float((first - second).abs().max()) <= 1e-5 * float(first.abs().max())


def _content(fed: Fed, *, special: bool = False) -> Tensor:
    """Tokens that are neither padding nor, unless `special`, special."""
    ids: Any = ids_of(fed)
    content, told = torch.ones_like(ids, dtype=torch.bool), fed if isinstance(fed, Mapping) else {}
    if isinstance(mask := told.get("attention_mask"), Tensor) and mask.shape == ids.shape:
        content &= mask.bool()
    return content if special or SPECIAL not in told else content & ~told[SPECIAL].bool()


def _token_losses(logits: Tensor, labels: Tensor) -> Score:
    """Cross-entropy over the tokens of each sample, one sample after another: vocabularies are large."""
    labels, rows = labels.to(logits.device), range(len(labels))
    sums = [F.cross_entropy(logits[i].float(), labels[i], ignore_index=IGNORED, reduction="sum") for i in rows]
    counts = (labels != IGNORED).sum(1)
    return Score(torch.stack(sums) / counts.clamp(min=1), counts)


def _next_tokens(model: nn.Module, batch: Any, number: int) -> Score:
    fed, given = fed_of(batch), labels_of(batch)
    ids: Any = ids_of(fed)
    labels = given if given is not None and given.shape == ids.shape else ids.masked_fill(~_content(fed), IGNORED)
    labels = labels[:, 1:].masked_fill(~_content(fed, special=True)[:, :-1], IGNORED)  # padding predicts nothing
    return _token_losses(_feed_ids(model, fed, ids)[:, :-1], labels)


def _masked_tokens(model: nn.Module, batch: Any, number: int, mask_token: int) -> Score:
    fed = fed_of(batch)
    ids: Any = ids_of(fed)
    chosen = masked(_content(fed).cpu(), number).to(ids.device)
    return _token_losses(_feed_ids(model, fed, ids.masked_fill(chosen, mask_token)), ids.masked_fill(~chosen, IGNORED))


def masked(content: Tensor, seed: int) -> Tensor:
    """Which tokens are masked: 15 % of each sample's content, at least one, drawn with this seed."""
    draws = torch.rand(content.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~content, -1)
    count = (content.sum(1, keepdim=True) * MASKED).round().clamp(min=1)
    return (draws.argsort(1, descending=True).argsort(1) < count) & content


def _own_words(model: nn.Module, batch: Any, number: int) -> Score:
    words: Any = fed_of(batch)
    words = words.to(next(model.parameters()).device)
    losses = model(words[:, :-1], words[:, 1:])
    return Score(losses.mean(1), losses.new_full((len(words),), losses.shape[1]))


def _classes(model: nn.Module, batch: Any, number: int) -> Score:
    logits: Any = _outputs(feed(model, fed_of(batch)))[0]
    labels: Any = labels_of(batch)
    labels, logits = labels.to(logits.device, torch.int64), logits.mT if logits.ndim == 3 else logits
    losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none").view(len(labels), -1)
    right, counts = logits.argmax(1) == labels, (labels != IGNORED).view(len(labels), -1).sum(1)
    few = counts.clamp(min=1)
    return Score(losses.sum(1) / few, counts, PERCENT * right.view(len(labels), -1).sum(1) / few)


def _own_loss(model: nn.Module, batch: Any, number: int) -> Score:
    _, loss = _outputs(feed(model, fed_of(batch)))
    assert loss is not None, "the model gave a loss for the first batch"
    return Score(loss.view(1), torch.ones(1))
