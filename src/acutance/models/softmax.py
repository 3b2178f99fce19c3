"""An adaptive softmax whose words share their vectors with the input embedding."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedSoftmax(nn.Module):
    """The adaptive softmax (https://arxiv.org/abs/1609.04309) as Transformer-XL's public code ties it.

    Every word's output vector is its embedding, of the same width in all clusters, with a bias of its own. The first
    cluster is predicted together with one entry per rarer cluster, which have a vector and a bias of their own:
    p(word) = p(cluster) p(word | cluster). Without cut-offs it is a plain softmax.
    `torch.nn.AdaptiveLogSoftmaxWithLoss` has a further projection per cluster and no word biases there, so that it
    cannot be tied.
    """

    def __init__(self, vocabulary: int, dim: int, cutoffs: tuple[int, ...]) -> None:
        super().__init__()
        if cutoffs:
            _keep_uncompiled()
        self.ends = (0, *cutoffs, vocabulary)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), dim)) if cutoffs else None
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs))) if cutoffs else None

    def forward(self, hidden: Tensor, words: Tensor, embedding: Tensor) -> Tensor:
        """−log p of each word, in float32 or better.

        Args:
            hidden: (…, dim).
            words: (…) indices.
            embedding: (vocabulary, dim).
        """
        if self.cluster_weight is None:
            logits = _exact(F.linear(hidden, embedding, self.bias))
            return F.cross_entropy(logits.flatten(0, -2), words.flatten(), reduction="none").view(words.shape)
        losses: Tensor = self._adaptive(hidden.flatten(0, -2), words.flatten(), embedding)
        return losses.view(words.shape)

    def log_probabilities(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """log p of all words, (…, vocabulary)."""
        if self.cluster_weight is None:
            return F.log_softmax(_exact(F.linear(hidden, embedding, self.bias)), dim=-1)
        head = F.log_softmax(self._head(hidden, embedding), dim=-1)
        common, clusters = head[..., : self.ends[1]], head[..., self.ends[1] :].unbind(-1)
        rare = [
            cluster[..., None] + F.log_softmax(self._logits(hidden, embedding, low, high), dim=-1)
            for cluster, (low, high) in zip(clusters, pairwise(self.ends[1:]), strict=True)
        ]
        return torch.cat([common, *rare], dim=-1)

    def _adaptive(self, hidden: Tensor, words: Tensor, embedding: Tensor) -> Tensor:
        first = self.ends[1]
        cluster = torch.bucketize(words, torch.tensor(self.ends[1:-1], device=words.device), right=True)
        entry = torch.where(cluster == 0, words, first + cluster - 1)
        loss = F.cross_entropy(self._head(hidden, embedding), entry, reduction="none")
        for number, (low, high) in enumerate(pairwise(self.ends[1:]), 1):
            rows = (cluster == number).nonzero().squeeze(1)
            logits = self._logits(hidden[rows], embedding, low, high)
            loss = loss.index_add(0, rows, F.cross_entropy(logits, words[rows] - low, reduction="none").to(loss.dtype))
        return loss

    def _head(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        assert self.cluster_weight is not None
        assert self.cluster_bias is not None
        first = self.ends[1]
        weight = torch.cat([embedding[:first], self.cluster_weight])
        return _exact(F.linear(hidden, weight, torch.cat([self.bias[:first], self.cluster_bias])))

    def _logits(self, hidden: Tensor, embedding: Tensor, low: int, high: int) -> Tensor:
        return _exact(F.linear(hidden, embedding[low:high], self.bias[low:high]))


@cache
def _keep_uncompiled() -> None:
    """How many words a cluster has depends on the data. No decorator: it would import the compiler, for seconds."""
    TiedSoftmax._adaptive = torch.compiler.disable(TiedSoftmax._adaptive)  # type: ignore[method-assign]


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
