"""A stack of blocks: what the reference models have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError
from acutance.mitigations import LayerShape, Mitigation, Weights, weights_together
from acutance.models.block import Block, BlockConfig

INIT_STD = 0.02


class BlockStack(nn.Module):
    """Blocks that run one after another and hand on the first one's values; layers are numbered from 1."""

    blocks: nn.ModuleList
    checkpointing = False

    @property
    def prefix_tokens(self) -> int:
        """Tokens in front of the content, such as a class token."""
        return 0

    @property
    def suffix_tokens(self) -> int:
        """Tokens behind the content, such as a decoder's embeddings of classes."""
        return 0

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last block."""
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations (non-reentrant)."""
        self.checkpointing = enable

    def fit_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Another model's weights as this one wants them, where that takes no guess: another image size, say."""
        return dict(state)

    def run_blocks(self, x: Tensor) -> Tensor:
        """All blocks, with v⁰ passed from each to the next."""
        v0: Tensor | None = None
        for block, weights in zip(self.blocks, self._made_weights(), strict=True):
            x, v0 = self._run(block, x, v0, *weights)
        return x

    def named_blocks(self) -> list[tuple[str, Block]]:
        """The blocks with their paths in `blocks`, first to last; they may sit inside wrappers."""
        return [(name, module) for name, module in self.blocks.named_modules() if isinstance(module, Block)]

    def carried(self) -> tuple[str | None, tuple[int, ...] | None]:
        """The mitigation in the blocks now as a spec, and the layers that have it; None where all have."""
        found = [(layer, block.attn.mitigation) for layer, (_, block) in enumerate(self.named_blocks(), 1)]
        specs = {layer: carried.spec for layer, carried in found if type(carried) is not Mitigation}
        if len(set(specs.values())) > 1:
            raise AcutanceError(f"layers carry different mitigations, which one configuration cannot say: {specs}")
        layers = None if len(specs) in (0, len(self.blocks)) else tuple(specs)
        return next(iter(specs.values()), None), layers

    def install(self, mitigation: Mitigation, layers: tuple[int, ...] | None = None) -> None:
        """Build the model with a mitigation; into a trained one, `acutance.sites.mitigate` puts it."""
        if type(mitigation) is Mitigation:
            return
        for layer, (_, block) in enumerate(self.named_blocks(), 1):
            if layers is None or layer in layers:
                attn = block.attn
                shape = LayerShape(layer, attn.heads * attn.head_dim, attn.heads, attn.head_dim, attn.heads)
                attn.install(mitigation.for_layer(shape))

    def _made_weights(self) -> list[tuple[()] | tuple[Weights]]:
        """W_V and W_proj of the blocks whose mitigation makes them, for all blocks at once."""
        blocks = [block for block in self.blocks if type(block) is Block]
        if len(blocks) < len(self.blocks):  # wrapped for sharding, say: only inside are the parameters whole
            return [()] * len(self.blocks)
        made = weights_together([block.attn.mitigation for block in blocks])
        return [() if weights is None else (weights,) for weights in made]

    def _run(self, block: nn.Module, x: Tensor, v0: Tensor | None, *weights: Weights) -> tuple[Tensor, Tensor]:
        if self.checkpointing and torch.is_grad_enabled():
            x, first = checkpoint(block, x, v0, *weights, use_reentrant=False)
        else:
            x, first = block(x, v0, *weights)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not x.requires_grad:
            _refuse_cut_graph(block)
        return x, first


def make_blocks(config: BlockConfig, depth: int, drop_path: float = 0.0) -> nn.ModuleList:
    """Blocks whose stochastic depth grows linearly from 0 in the first to `drop_path` in the last."""
    rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
    blocks = [Block(config, rate) for rate in rates]
    for layer, block in enumerate(blocks, 1):
        block.attn.layer = layer
    return nn.ModuleList(blocks)


def learnt_tokens(count: int, dim: int) -> nn.Parameter:
    """Tokens (1, count, dim) that are parameters."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count, dim), std=INIT_STD))


def init_linear(module: nn.Module) -> None:
    """Truncated normal weights and no bias, as in DeiT; for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _refuse_cut_graph(block: nn.Module) -> None:
    """Re-entrant checkpointing cuts the graph when no input needs a gradient: nothing would be learnt."""
    if any(parameter.requires_grad for parameter in block.parameters()):
        raise AcutanceError(
            "a block has parameters to train but its output carries no gradient. Re-entrant checkpointing "
            "does this when the block's input needs no gradient (frozen embeddings, say): use "
            "model.set_grad_checkpointing(), which is non-reentrant, or use_reentrant=False"
        )
