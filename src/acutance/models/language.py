"""The causal language model of NeuTRENO's WikiText-103 experiment (https://arxiv.org/abs/2312.00751).

Its public code is that of "Linear Transformers Are Secretly Fast Weight Programmers" (https://arxiv.org/abs/2102.11174),
which is Transformer-XL's with absolute positions and no memory.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import Mitigation
from acutance.models.block import ModelConfig
from acutance.models.vit import INIT_STD, BlockStack, make_blocks


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(ModelConfig):
    """The choices behind a `LanguageModel`; the defaults are NeuTRENO's WikiText-103 model."""

    vocabulary: int = 267_735  # words, the most frequent first
    dim: int = 128
    depth: int = 16
    heads: int = 8
    hidden: int = 2048  # channels inside the MLP
    cutoffs: tuple[int, ...] = (20_000, 40_000, 200_000)  # where the softmax changes to rarer words; () is a plain one
    mitigation: str | None = None  # as a spec, e.g. "neutreno:0.4"
    mitigation_layers: tuple[int, ...] | None = None  # 1 is the first; None is every layer
    dropout: float = 0.1  # after the embedding, the projections, in the MLP and before the softmax
    attention_dropout: float = 0.0  # on the attention weights; the public code has none
    causal, norm, norm_eps, activation, drop_path = True, "post", 1e-5, nn.ReLU, 0.0
    qkv_bias = proj_bias = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise AcutanceError(f"dim {self.dim} must be even: positions are pairs of a sine and a cosine")
        if any(low >= high for low, high in pairwise((0, *self.cutoffs, self.vocabulary))):
            raise AcutanceError(f"cutoffs {self.cutoffs} must grow to below {self.vocabulary}: () is a plain softmax")


class LanguageModel(BlockStack):
    """A post-LN Transformer decoder with sinusoidal positions and an adaptive softmax tied to its embedding.

    Its arguments are the fields of `LanguageConfig`; `mitigation` may also be a `Mitigation`.
    """

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config = LanguageConfig(**options)
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks, self.final_norm = make_blocks(config), f"blocks.{config.depth - 1}.norm2"
        self.softmax = TiedSoftmax(config.vocabulary, config.dim, config.cutoffs)
        for name, parameter in self.named_parameters():  # norms about one, no bias: as the public code starts
            if name.endswith("weight"):
                nn.init.normal_(parameter, mean=float(".norm" in name), std=INIT_STD)
            else:
                nn.init.zeros_(parameter)
        self.install(mitigation, config.mitigation_layers)

    def forward_features(self, tokens: Tensor) -> Tensor:
        """What the softmax reads: (batch, tokens) words to (batch, tokens, dim)."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ShapeError(f"tokens {tuple(tokens.shape)} of {tokens.dtype}: give indices (batch, tokens)")
        length, dim = tokens.shape[1], self._config.dim
        x = self.embed(tokens) * math.sqrt(dim)
        # Positions are counted back from the last token, as in Transformer-XL.
        like: dict[str, Any] = {"device": x.device, "dtype": torch.promote_types(x.dtype, torch.float32)}
        angles = torch.arange(length - 1, -1, -1, **like)[:, None] * 10_000 ** (-torch.arange(0, dim, 2, **like) / dim)
        x = self.drop(x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype))
        return self.drop(self.run_blocks(x))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """−log p of the targets, (batch, targets); without targets, the features.

        Targets are the words that follow, (batch, tokens), or those after the last few tokens only.
        """
        features = self.forward_features(tokens)
        if targets is None:
            return features
        if targets.ndim != 2 or len(targets) != len(tokens) or not 0 < targets.shape[1] <= tokens.shape[1]:
            raise ShapeError(f"targets {tuple(targets.shape)} are not the words after tokens {tuple(tokens.shape)}")
        return self.softmax(features[:, -targets.shape[1] :], targets, self.embed.weight)  # type: ignore[no-any-return]

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """log p of every word after every token, (batch, tokens, vocabulary): for few tokens."""
        return self.softmax.log_probabilities(self.forward_features(tokens), self.embed.weight)


class TiedSoftmax(nn.Module):
    """The adaptive softmax (https://arxiv.org/abs/1609.04309) as Transformer-XL's public code ties it.

    Every word's output vector is its embedding, with a bias of its own. The first cluster is predicted together with
    one entry per rarer cluster: p(word) = p(cluster) p(word | cluster). Without cut-offs it is a plain softmax.
    `torch.nn.AdaptiveLogSoftmaxWithLoss` has a further projection per cluster, so it cannot be tied.
    """

    def __init__(self, vocabulary: int, dim: int, cutoffs: tuple[int, ...]) -> None:
        super().__init__()
        self.ends = (0, *cutoffs, vocabulary)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), dim)) if cutoffs else None
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs))) if cutoffs else None

    def forward(self, hidden: Tensor, words: Tensor, embedding: Tensor) -> Tensor:
        """−log p of each word, in float32 or better: hidden (…, dim), words (…), embedding (vocabulary, dim)."""
        rows, wanted = hidden.flatten(0, -2), words.flatten()
        if self.cluster_weight is not None:
            return self._adaptive(rows, wanted, embedding).view(words.shape)
        return F.cross_entropy(self._head(rows, embedding), wanted, reduction="none").view(words.shape)

    def log_probabilities(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """log p of all words, (…, vocabulary)."""
        head = F.log_softmax(self._head(hidden, embedding), dim=-1)
        common, clusters = head[..., : self.ends[1]], head[..., self.ends[1] :].unbind(-1)
        rare = [
            cluster[..., None] + F.log_softmax(_logits(hidden, embedding[low:high], self.bias[low:high]), dim=-1)
            for cluster, (low, high) in zip(clusters, pairwise(self.ends[1:]), strict=True)
        ]
        return torch.cat([common, *rare], dim=-1)

    @_disable_dynamo  # a cluster's size depends on the data; `torch.compiler.disable` takes seconds to import
    def _adaptive(self, hidden: Tensor, words: Tensor, embedding: Tensor) -> Tensor:
        cluster = torch.bucketize(words, torch.tensor(self.ends[1:-1], device=words.device), right=True)
        entry = torch.where(cluster == 0, words, self.ends[1] + cluster - 1)
        loss = F.cross_entropy(self._head(hidden, embedding), entry, reduction="none")
        for number, (low, high) in enumerate(pairwise(self.ends[1:]), 1):
            rows = (cluster == number).nonzero().squeeze(1)
            logits = _logits(hidden[rows], embedding[low:high], self.bias[low:high])
            loss = loss.index_add(0, rows, F.cross_entropy(logits, words[rows] - low, reduction="none").to(loss.dtype))
        return loss

    def _head(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Logits of the frequent words and of the clusters."""
        weight, bias = embedding[: self.ends[1]], self.bias[: self.ends[1]]
        if self.cluster_weight is not None and self.cluster_bias is not None:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return _logits(hidden, weight, bias)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
