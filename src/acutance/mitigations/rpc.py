"""RPC-Attention (Unveiling the Hidden Structure of Self-Attention via Kernel PCA, 2406.13762)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.attention import AttentionCall
from acutance.attention.products import repeat_heads
from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations.base import Mitigation, Scores, register


@register("rpc")
class RPC(Mitigation):
    """Symmetric attention softmax(k kᵀ) v; in layer 1 keys lose sparse errors before (https://arxiv.org/abs/2406.13762).

    From l = y = 0, `iterations` times: e = soft(k − l + y/μ, λμ), c = k − e − y/μ, l = softmax(c cᵀ) v and
    y ← y + μ (k − l − e), with soft(x, t) = sign(x) max(|x| − t, 0). The last l is u.

    As in the authors' code, μ is D/(4 · mean ‖k‖₁) per head, D the width of all heads together. The mean runs over the
    tokens that each token sees, so it ignores padding and is causal where attention is. Not the identity at the start,
    and it learns nothing. W_Q gets no gradient. Each iteration costs a product. With rotary positions k is the rotated
    key, so what is subtracted from it makes attention depend on absolute positions. Iterations amplify rounding: after
    four, bfloat16 may be far off.

    Args:
        iterations: 4 in layer 1, 2 where all layers iterate, in the authors' runs.
        threshold: λ.
        all_layers: iterate in all layers, not only in the first.
    """

    requires = ("square", "plain_scores")

    def __init__(self, iterations: int = 4, threshold: float = 4.0, all_layers: bool = False) -> None:
        super().__init__()
        self.iterations, self.threshold, self.all_layers = iterations, threshold, all_layers
        self.check_options()
        if iterations < 1 or self.threshold < 0:
            given = f"iterations={iterations}, threshold={threshold:g}"
            raise AcutanceError(f"rpc: iterations are at least 1 and the threshold is not negative; got {given}")

    def scores(self, q: Tensor | None, k: Tensor | None, call: AttentionCall) -> Scores:
        if q is None or k is None:
            raise AcutanceError(f"{call.name}: rpc needs keys, which a softmax written in this way does not show")
        if k.shape[-1] != call.v.shape[-1]:
            sizes = f"k {tuple(k.shape)}, v {tuple(call.v.shape)}"
            raise ShapeError(
                f"{call.name}: rpc subtracts attention's output from the keys, so both are as wide: {sizes}"
            )
        clean = self._clean(k, call) if call.layer == 1 or self.all_layers else k
        return repeat_heads(clean, q.shape[1]), clean, None

    def _clean(self, k: Tensor, call: AttentionCall) -> Tensor:
        """The keys of the last iteration, whose product is the model's own."""
        heads, dtype = call.A.heads, k.dtype
        k = k.to(torch.promote_types(dtype, torch.float32))  # differences of what is nearly alike
        size = call.visible_mean(k.abs().sum(-1, keepdim=True))[:, :: heads // k.shape[1]]
        mu = heads * k.shape[-1] / 4 / size.clamp_min(torch.finfo(size.dtype).eps)  # 0 in a row that sees nothing
        low = y = torch.zeros_like(k)
        for left in reversed(range(self.iterations)):
            noisy = k - low + y / mu
            sparse = noisy.sign() * F.relu(noisy.abs() - self.threshold * mu)
            clean = (k - sparse - y / mu).to(dtype)
            if left:
                low = call.A.replace(q=clean, k=clean).apply(call.v)
                y = y + mu * (k - low - sparse)
        return clean
