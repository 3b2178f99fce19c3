"""Re-attention (DeepViT: Towards Deeper Vision Transformer, 2103.11886)."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.attention.products import repeat_heads
from acutance.mitigations.base import LayerShape, Mitigation, register


@register("reattention")
class Reattention(Mitigation):
    """u = BN(Θ A) v: heads mixed after the softmax, Θ learnt from the identity (https://arxiv.org/abs/2103.11886).

    Not the identity at the start. BN is a batch norm whose channels are the heads: in training every head's matrix has
    mean 0 and variance 1 over the batch and all pairs of tokens, in evaluation it uses running statistics. Where a
    mask, causality or windows hide pairs it is refused. Θ has no bias: the norm would take it out. It forms the N×N
    matrix of every head.

    Args:
        large: do so above 1024 tokens too, where it is refused otherwise.
    """

    requires = ("all_visible", "all_tokens", "plain_attention", "plain_output")
    changes_attention = True

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.large = large
        self.check_options()

    def build(self, shape: LayerShape) -> None:
        self.mixing = nn.Parameter(torch.eye(shape.heads))
        self.norm = nn.BatchNorm2d(shape.heads)

    def output(self, u: Tensor, w: Tensor, call: AttentionCall) -> Tensor:
        mixed: Tensor = self.norm(torch.einsum("gh,bhij->bgij", self.mixing, call.matrix(self).to(self.mixing.dtype)))
        call.operator, call.refusal = None, "its heads are mixed after the softmax, so there is no operator per head"
        return (mixed.to(w.dtype) @ repeat_heads(w, u.shape[1])).to(u.dtype)
