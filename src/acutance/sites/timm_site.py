"""What timm's attention classes have in common: the product, the output projection, where the weights are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import AcutanceError, NoSitesError
from acutance.operator import AttentionOperator
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.linear import is_plain, matrix_of
from acutance.sites.patched import PatchedSite, Stack

POST_NORM = {"ResPostBlock", "ResPostRelPosBlock", "EvaBlockPostNorm"}  # norm1 stands after their attention
# What the attentions below are made of: one that has more does something that our forward would leave out.
PARTS = {
    *("qkv", "q", "kv", "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "norm", "gate"),
    *("attn_drop", "softmax", "proj", "proj_drop", "rel_pos", "relative_position_bias_table"),
    *("relative_position_index", "sr", "pool", "act", "proj_l", "proj_w", "mitigation"),
}


class Product(NamedTuple):
    """What enters an attention product: (batch, heads, tokens, head_dim) each, k and v possibly of fewer heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    masks: tuple[Tensor, ...] = ()  # bool (True where a key takes part) or added to the logits one after the other
    causal: bool = False

    @property
    def mask(self) -> Tensor | None:
        """The masks in one, as `scaled_dot_product_attention` takes it."""
        return reduce(torch.add, self.masks) if self.masks else None


class TimmSite(PatchedSite):
    """The attention of one block. A subclass says how its class makes q, k and v; the rest is common to them."""

    block: Any
    attention: Any

    def __init__(self, stack: Stack, layer: int, name: str, block: nn.Module, attention: nn.Module) -> None:
        super().__init__(stack, layer, name, block, attention)
        self._refuse_idle_adapter()
        self.heads = self.attention.num_heads
        self.kv_heads = getattr(attention, "num_kv_heads", self.heads)
        rows, self.dim = self.value_weight().shape
        self.head_dim = rows // self.kv_heads
        self.stage = ""  # path of the container that holds the block

    def _refuse_idle_adapter(self) -> None:
        """BEiT and EVA take the weight of their joint projection, past whatever was put around it."""
        joint, beside = getattr(self.attention, "qkv", None), getattr(self.attention, "q_bias", None)
        if beside is not None and joint is not None and not (is_plain(joint) or self.attention.qkv_bias_separate):
            raise NoSitesError(
                f"{self.name} multiplies by the weight of its qkv itself, so the {type(joint).__name__} around it does "
                f"nothing there: merge it into the layer, or put it around proj alone. {TOKENS_REMAIN}"
            )

    @abstractmethod
    def project(self, x: Tensor, *args: Any, **options: Any) -> Product:
        """q, k and v for the tokens x; the arguments are those of the attention's own forward."""

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A joint projection as q, k and v by head."""
        by_head = qkv.reshape(*qkv.shape[:2], 3, self.heads, self.head_dim)
        q, k, v = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def merge(self, u: Tensor, x: Tensor) -> Tensor:
        """What W_proj is given, from the heads side by side."""
        return u

    def multiply(self, product: Product, v: Tensor) -> Tensor:
        """A v, in timm's own way: fused or step by step, with its dropout."""
        attention, q, k = self.attention, product.q, product.k
        if self.kv_heads < self.heads:
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        if attention.fused_attn:
            dropout = attention.attn_drop.p if attention.training else 0.0
            mask = product.mask
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=product.causal)
        logits = (q * attention.scale) @ k.transpose(-2, -1)
        for bias in _biases(product, logits):
            logits = logits + bias
        weights: Tensor = attention.attn_drop(logits.softmax(dim=-1))
        return weights @ v

    def operator(self, product: Product) -> AttentionOperator:
        """A itself."""
        q, k, mask = product.q, product.k, product.mask
        if mask is not None and not product.causal:
            mask = mask[(None,) * (4 - mask.ndim)]  # of two axes it would pass for one of keys
        scale = None if self.attention.fused_attn else self.attention.scale
        return AttentionOperator(q, k, mask=None if product.causal else mask, causal=product.causal, scale=scale)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """In place of the attention's own forward, operation for operation."""
        self.enter_attention(self.attention, (x,), {})
        product = self.project(x, *args, **options)
        u = self.attend(product.v, partial(self.multiply, product), partial(self.operator, product))
        merged = self.merge(u.transpose(1, 2).reshape(*x.shape[:2], -1), x)
        y: Tensor = self.attention.proj_drop(self.finish(self.attention.proj(merged)))
        return y

    def divert(self) -> Callable[[], None]:
        """Give the module our forward instead of its own."""
        attention = self.attention
        if "forward" in vars(attention):
            raise AcutanceError(f"{self.name}: something else has replaced the forward of this module already")
        unknown = {*attention._modules, *attention._parameters, *attention._buffers} - PARTS
        if unknown:
            raise AcutanceError(
                f"{self.name} ({type(attention).__name__}) has parts that Acutance does not know: "
                f"{', '.join(sorted(unknown))}. {TOKENS_REMAIN}"
            )
        attention.forward = self.forward
        return partial(delattr, attention, "forward")

    def refuse_first_values(self) -> str | None:
        """Stages merge or rearrange their tokens."""
        stages = list(dict.fromkeys(cast(TimmSite, site).stage for site in self.stack.sites))
        if len(stages) > 1:
            return f"its layers are in several stages ({', '.join(stages)}), which do not share their tokens"
        return None

    def query_weight(self) -> Tensor:
        """W_Q."""
        return cast(Tensor, _projections(self.attention, matrix_of)[0])

    def key_weight(self) -> Tensor:
        """W_K."""
        return cast(Tensor, _projections(self.attention, matrix_of)[1])

    def value_weight(self) -> Tensor:
        """W_V."""
        return cast(Tensor, _projections(self.attention, matrix_of)[2])

    def value_bias(self) -> Tensor | None:
        """Beside the joint projection or in it."""
        beside: Tensor | None = getattr(self.attention, "v_bias", None)
        return _projections(self.attention, attrgetter("bias"))[2] if beside is None else beside

    def projection_weight(self) -> Tensor:
        """W_proj."""
        return matrix_of(self.attention.proj)

    def projection_bias(self) -> Tensor | None:
        """The bias of the output projection."""
        bias: Tensor | None = self.attention.proj.bias
        return bias

    def pre_norm(self) -> nn.Module | None:
        """norm1, unless it stands after the attention."""
        kind = type(self.block)
        if not kind.__module__.startswith("timm."):
            raise AcutanceError(f"{self.name}: which norm {kind.__name__} applies before its attention is not known")
        return None if kind.__name__ in POST_NORM else self.block.norm1

    def branch_gain(self) -> Tensor | None:
        """LayerScale's, if the block has it."""
        gain: Tensor | None = getattr(self.block, "gamma_1", None)
        return getattr(getattr(self.block, "ls1", None), "gamma", None) if gain is None else gain


def _biases(product: Product, logits: Tensor) -> list[Tensor]:
    """The masks as what is added to the logits."""
    if product.causal:
        return [logits.new_full(logits.shape[-2:], float("-inf")).triu(1)]
    hidden = float("-inf")
    return [
        torch.zeros_like(mask, dtype=logits.dtype).masked_fill(~mask, hidden) if mask.dtype == torch.bool else mask
        for mask in product.masks
    ]


def _projections(attention: Any, read: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """The weights or biases of q, k and v, out of one, two or three layers."""
    if getattr(attention, "qkv", None) is not None:
        joint = read(attention.qkv)
        return (None, None, None) if joint is None else joint.chunk(3)
    if hasattr(attention, "kv"):
        keys_and_values = read(attention.kv)
        halves = (None, None) if keys_and_values is None else keys_and_values.chunk(2)
        return read(attention.q), *halves
    q, k, v = (read(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    return q, k, v
