"""Language modelling: the next word, in sequences cut from one long text; perplexity over sliding windows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.lab.data.tokens import Corpus, load_corpus
from acutance.lab.tasks.base import BatchSlice, Task, check_ranges, in_order, incidental, load_and_install, turns
from acutance.models import LanguageConfig
from acutance.models.language import LanguageModel

LARGEST_LOSS = 700.0  # its exponential is still finite


@dataclass(frozen=True)
class LanguageTaskConfig:
    """Which text, which model, and how it is read; the defaults are NeuTRENO's experiment on WikiText-103.

    The model takes the text's vocabulary, and the cut-offs that are smaller than it.
    """

    kind: ClassVar[str] = "language"
    corpus: str = "wikitext-103"
    data_dir: str | None = incidental(None)
    model: LanguageConfig = field(default_factory=LanguageConfig)
    length: int = 256  # words in a training sequence and in an evaluation window
    val_stride: int = 256  # words by which windows move in evaluations during training: fast, but a higher perplexity
    test_stride: int = 1  # the same on the test set, as in the paper
    windows: int = incidental(64)  # windows evaluated at once
    weights: str | None = None  # start from these, e.g. to fine-tune; a file that acutance.io.load_checkpoint reads

    def __post_init__(self) -> None:
        check_ranges("task", self, {"1 or more": "length val_stride test_stride windows"})
        if (stride := max(self.val_stride, self.test_stride)) > self.length:
            left_out = f"windows of {self.length} words that move on by {stride} leave words out"
            raise AcutanceError(f"{left_out}: choose strides of at most task.length")


# A small model for small texts, not tuned: 256 channels, a plain softmax, more dropout.
SMALL = LanguageConfig(dim=256, depth=6, heads=8, hidden=1024, cutoffs=(), dropout=0.3)
WIKITEXT_103 = LanguageTaskConfig()
WIKITEXT_2 = LanguageTaskConfig(corpus="wikitext-2", model=SMALL, length=128, val_stride=128)


class LanguageTask(Task[LanguageTaskConfig]):
    """Cross-entropy per word; perplexity."""

    headline: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "words"
    probe_samples: ClassVar[int] = 16

    def __init__(self, config: LanguageTaskConfig, *, seed: int, device: torch.device) -> None:
        super().__init__(config, seed=seed, device=device)
        self._corpus: Corpus = load_corpus(config.corpus, config.data_dir)
        self._text = self._corpus.train.to(device)

    def _words(self, split: str) -> Tensor:
        texts = {"train": self._corpus.train, "val": self._corpus.valid, "test": self._corpus.test}
        if split not in texts:
            raise AcutanceError(f"no split {split!r}; there are {', '.join(texts)}")
        return texts[split].to(self.device)

    def build_model(self) -> nn.Module:
        """The model of the configuration, for this text's words."""
        vocabulary, chosen = len(self._corpus.vocabulary), self.config.model
        cutoffs = tuple(cutoff for cutoff in chosen.cutoffs if cutoff < vocabulary)
        plain = replace(chosen, vocabulary=vocabulary, cutoffs=cutoffs, mitigation=None, mitigation_layers=None)
        model = LanguageModel(**plain.to_dict())
        load_and_install(model, self.config.weights, chosen.mitigation, chosen.mitigation_layers)
        return model

    def units(self, batch_size: int) -> int:
        return batch_size * self.config.length

    def size(self, split: str) -> int:
        """The number of places where a sequence can begin."""
        return len(self._words(split)) - self.config.length

    def inputs(self, split: str, indices: Sequence[int]) -> Tensor:
        places = torch.tensor(indices)[:, None] + torch.arange(self.config.length)
        return self._words(split)[places.to(self.device)]

    def probe(self) -> Tensor:
        """The first sequences of the validation text."""
        length = self.config.length
        return self.inputs("val", range(0, min(self.probe_samples * length, self.size("val") + 1), length))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Sequences in each of `batch_size` equal columns of the text; an incomplete last one is left out."""
        steps = (len(self._text) // batch_size - 1) // self.config.length
        if steps < 1:
            few = f"too few for {batch_size} columns of {self.config.length} words and the one that follows"
            advice = "lower loop.batch_size or task.length"
            raise AcutanceError(f"{self.config.corpus} has {len(self._text)} words to train on, {few}: {advice}")
        return steps

    def batches(self, batch_size: int, first_step: int, part: BatchSlice) -> Iterator[tuple[Tensor, Tensor]]:
        """Words and the words that follow. Every epoch reads `batch_size` columns of the text from top to bottom."""
        steps, length, height = self.steps_per_epoch(batch_size), self.config.length, len(self._text) // batch_size
        columns = self._text[: height * batch_size].view(batch_size, height)[part.rows(batch_size)]
        for step in count(first_step):
            start = step % steps * length
            yield columns[:, start : start + length], columns[:, start + 1 : start + 1 + length]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean of −log p over all words."""
        tokens, targets = batch
        losses: Tensor = model(tokens, targets)
        return losses.mean()

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        return "corpus", "length", "test_stride" if split == "test" else "val_stride"

    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """Perplexity and its logarithm over sliding windows; the processes share the work.

        "val" is the corpus's own validation text, read with `val_stride`; "test" is read with `test_stride`.
        """
        text = self._words(split)
        stride = self.config.test_stride if split == "test" else self.config.val_stride
        model.eval()
        loss = sliding_loss(model, text, window=self.config.length, stride=stride, batch_size=self.config.windows)
        perplexity = math.exp(loss) if loss < LARGEST_LOSS else math.inf
        return {"perplexity": perplexity, "loss": loss, "stride": float(stride)}


@torch.no_grad()
def sliding_loss(model: nn.Module, text: Tensor, *, window: int = 256, stride: int = 1, batch_size: int = 64) -> float:
    """The mean of −log p over all words of a text but the first. Its exponential is the perplexity.

    A window moves over the text (words,). All words of the first window count, and the last `stride` of each later one.
    The result is that of `sliding_loss_one_by_one`, but each process reads `batch_size` windows at a time and computes
    the softmax only for words that count. `model(tokens, targets)` gives −log p of the targets.
    """
    last = len(text) - 1
    if last < 1:
        raise AcutanceError(f"a text of {len(text)} words has none to predict: two are needed")
    ends = torch.tensor([*range(min(window, last), last, stride), last])  # exclusive: the last word is a target only
    counts, window = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)), int(ends[0])
    chunks = [slice(0, 1), *(slice(first, first + batch_size) for first in range(1, len(ends), batch_size))]
    own, sums = turns(len(chunks)), []
    for chosen in (chunks[index] for index in own):
        size = int(counts[chosen].max())
        inside = (ends[chosen, None] + torch.arange(-window, 0)).to(text.device)
        losses = model(text[inside], text[inside[:, -size:] + 1]).double()
        weight = torch.arange(size, 0, -1) <= counts[chosen, None]
        sums.append(float((losses * weight.to(losses.device)).sum()))
    return sum(in_order(own, sums)) / last


@torch.no_grad()
def sliding_loss_one_by_one(model: nn.Module, text: Tensor, *, window: int = 256, stride: int = 1) -> float:
    """What `sliding_loss` computes, one window after another as the paper describes it: slow and plain."""
    last = len(text) - 1
    window = min(window, last)
    losses = model(text[None, :window], text[None, 1 : window + 1])
    total, done = float(losses.double().sum()), window
    while done < last:
        end = min(done + stride, last)
        losses = model(text[None, end - window : end], text[None, end - window + 1 : end + 1])
        total += float(losses[0, done - end :].double().sum())
        done = end
    return total / last
