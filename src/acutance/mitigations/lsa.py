"""LSA, locality self-attention (Vision Transformer for Small-Size Datasets, 2112.13492)."""

import torch
from torch import Tensor, nn

from acutance.attention import AttentionCall
from acutance.attention.operator import HIDDEN
from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations.base import LayerShape, Mitigation, Scores, register

LOW = HIDDEN / 2  # a token that sees only itself keeps itself: others are hidden by less than that


@register("lsa")
class LSA(Mitigation):
    """softmax((1 + ω) s q kᵀ) without its diagonal, ω learnt per head from 0 (https://arxiv.org/abs/2112.13492).

    (1 + ω) s is the paper's 1/τ, s the model's own scale. Without the diagonal it is not the identity at the start. A
    token that sees no other one, such as the first of a causal model, keeps itself.

    Args:
        diagonal: leave the diagonal in, and only learn ω. This starts at the identity.
    """

    def __init__(self, diagonal: bool = False) -> None:
        super().__init__()
        self.diagonal = diagonal
        self.check_options()

    def build(self, shape: LayerShape) -> None:
        self.gain = nn.Parameter(torch.zeros(shape.heads))

    def scores(self, q: Tensor | None, k: Tensor | None, call: AttentionCall) -> Scores:
        if q is None or k is None:
            raise AcutanceError(f"{call.name}: lsa scales queries, which a softmax written in this way does not show")
        q = q * (1 + self.gain.to(q.dtype)[:, None, None])
        if self.diagonal:
            return q, k, None
        rows, keys = q.shape[-2], k.shape[-2]
        own = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        first = keys - call.behind - rows  # of the rows' own keys
        if first < 0:
            raise ShapeError(f"{call.name}: lsa hides each token from itself, but {rows} queries have {keys} keys")
        bias = q.new_zeros(rows, keys).masked_fill(own.triu(first).tril(first), LOW)
        return q, k, bias[None, None]
