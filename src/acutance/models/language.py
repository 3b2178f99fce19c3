"""The causal language model of NeuTRENO's WikiText-103 experiment (https://arxiv.org/abs/2312.00751).

Its public code is that of "Linear Transformers Are Secretly Fast Weight Programmers" (https://arxiv.org/abs/2102.11174),
which is Transformer-XL's with absolute positions and no memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from acutance.errors import ShapeError
from acutance.mitigations import Mitigation, as_mitigation
from acutance.models.block import Block, BlockConfig
from acutance.models.config import LanguageConfig
from acutance.models.softmax import TiedSoftmax
from acutance.models.stack import INIT_STD, BlockStack, make_blocks

NORM_EPS = 1e-5


class LanguageModel(BlockStack):
    """A post-LN Transformer decoder with sinusoidal positions and an adaptive softmax tied to its embedding.

    Args:
        mitigation: a `Mitigation`, its spec such as `neutreno:0.4`, or None.
        **options: the fields of `LanguageConfig`.
    """

    def __init__(self, *, mitigation: Mitigation | str | None = None, **options: Any) -> None:
        super().__init__()
        chosen = as_mitigation(mitigation)
        self._config = config = LanguageConfig(mitigation=None if mitigation is None else chosen.spec, **options)
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = make_blocks(_block_config(config), config.depth)
        self.softmax = TiedSoftmax(config.vocabulary, config.dim, config.cutoffs)
        self.apply(_init)
        self.install(chosen, config.mitigation_layers)

    @property
    def config(self) -> LanguageConfig:
        """What rebuilds this model, with the mitigation it carries now."""
        spec, layers = self.carried()
        return replace(self._config, mitigation=spec, mitigation_layers=layers)

    @property
    def final_norm(self) -> nn.Module:
        """The last block's second norm: after it there is no other."""
        last = [module for module in self.blocks[-1].modules() if isinstance(module, Block)]
        return last[0].norm2

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimiser should leave out of weight decay, beside biases and norms."""
        return {n for n, _ in self.named_parameters() if n == "embed.weight" or ".mitigation." in n}

    def forward_features(self, tokens: Tensor) -> Tensor:
        """What the softmax reads: (batch, tokens) words to (batch, tokens, dim)."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ShapeError(
                f"tokens {tuple(tokens.shape)} of {tokens.dtype}: this model takes (batch, tokens) indices"
            )
        x = self.embed(tokens) * math.sqrt(self._config.dim)
        x = self.drop(x + positions_from_the_end(tokens.shape[1], x))
        out: Tensor = self.drop(self.run_blocks(x))
        return out

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """−log p of the targets, (batch, targets); without targets, the features.

        Args:
            tokens: (batch, tokens) indices of words.
            targets: the words that follow, (batch, tokens), or those after the last few tokens only.
        """
        features = self.forward_features(tokens)
        if targets is None:
            return features
        if targets.ndim != 2 or len(targets) != len(tokens) or not 0 < targets.shape[1] <= tokens.shape[1]:
            raise ShapeError(f"targets {tuple(targets.shape)} are not the words after tokens {tuple(tokens.shape)}")
        loss: Tensor = self.softmax(features[:, -targets.shape[1] :], targets, self.embed.weight)
        return loss

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """log p of every word after every token, (batch, tokens, vocabulary): for few tokens."""
        return self.softmax.log_probabilities(self.forward_features(tokens), self.embed.weight)


def positions_from_the_end(length: int, like: Tensor) -> Tensor:
    """Sines, then cosines, of positions counted back from the last token, which has position 0: (length, dim).

    Counting back is Transformer-XL's way, and the public code's: the last token's embedding does not depend on how
    many came before.
    """
    dim = like.shape[-1]
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = 10_000 ** (-torch.arange(0, dim, 2, device=like.device, dtype=dtype) / dim)
    angles = torch.arange(length - 1, -1, -1, device=like.device, dtype=dtype)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def _block_config(config: LanguageConfig) -> BlockConfig:
    return BlockConfig(
        dim=config.dim,
        heads=config.heads,
        hidden=config.hidden,
        causal=True,
        qkv_bias=False,
        proj_bias=False,
        norm="post",
        norm_eps=NORM_EPS,
        activation="relu",
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


def _init(module: nn.Module) -> None:
    """Normal weights, norms about one, no bias: as the public code starts."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=INIT_STD)
    if isinstance(module, TiedSoftmax) and module.cluster_weight is not None:
        nn.init.normal_(module.cluster_weight, std=INIT_STD)
    if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
        nn.init.zeros_(module.bias)
