"""timm's attention classes, one site class each: how they make q, k and v, and what is special to them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import AcutanceError
from acutance.operator import AttentionOperator
from acutance.sites.patched import WINDOWS_APART, WINDOWS_MOVE
from acutance.sites.timm_site import Product, TimmSite


class GatedSite(TimmSite):
    """A norm of the attention's output and a gate made of its input may stand before W_proj."""

    def merge(self, u: Tensor, x: Tensor) -> Tensor:
        """With the norm and the gate, if any."""
        gate = getattr(self.attention, "gate", None)
        normed: Tensor = self.attention.norm(u)
        return normed if gate is None else normed * gate(x).sigmoid()

    def between(self) -> str | None:
        """Both are functions of the tokens."""
        norm, gate = self.attention.norm, getattr(self.attention, "gate", None)
        parts = [] if isinstance(norm, nn.Identity) else [f"a {type(norm).__name__}"]
        parts += [] if gate is None else ["a gate"]
        return f"{' and '.join(parts)} before W_proj" if parts else None


class PlainSite(GatedSite):
    """`Attention`: ViT, DeiT and most others."""

    def project(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Product:
        """One projection for all three, then the norms of q and k, if any."""
        q, k, v = self.split(self.attention.qkv(x))
        q, k = self.attention.q_norm(q), self.attention.k_norm(k)
        return Product(q, k, v, () if attn_mask is None else (attn_mask,), is_causal)


class RotarySite(GatedSite):
    """`AttentionRope` and `EvaAttention`: EVA, DINOv3 and others that turn q and k by their positions."""

    def project(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Product:
        """One projection or three, the norms of q and k, then the rotation of all but the prefix tokens."""
        attention = self.attention
        if attention.qkv is not None:
            q, k, v = self.split(_joint_projection(attention, x))
        else:
            layers = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        q, k = attention.q_norm(q), attention.k_norm(k)
        if rope is not None:
            q, k = self.rotate(q, rope).type_as(v), self.rotate(k, rope).type_as(v)
        return Product(q, k, v, () if attn_mask is None else (attn_mask,), is_causal)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Prefix tokens have no position."""
        from timm.layers import apply_rot_embed_cat

        prefix = self.attention.num_prefix_tokens
        layout = {"half": True} if getattr(self.attention, "rotate_half", False) else {}
        return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, **layout)], dim=2)


class BeitSite(TimmSite):
    """BEiT's `Attention`: biases by relative position, its own or one for all layers."""

    def project(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Product:
        """The keys have no bias."""
        q, k, v = self.split(_joint_projection(self.attention, x))
        own = None if self.attention.relative_position_bias_table is None else self.attention._get_rel_pos_bias()
        return Product(q, k, v, tuple(bias for bias in (own, shared_rel_pos_bias) if bias is not None))


class RelativeSite(TimmSite):
    """`RelPosAttention` of `vit_relpos*`."""

    def project(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Product:
        """A bias of the layer's own, or one for all layers."""
        q, k, v = self.split(self.attention.qkv(x))
        q, k = self.attention.q_norm(q), self.attention.k_norm(k)
        bias = shared_rel_pos if self.attention.rel_pos is None else self.attention.rel_pos.get_bias()
        return Product(q, k, v, () if bias is None else (bias,))


class WindowSite(TimmSite):
    """Swin's `WindowAttention`: the batch holds windows."""

    def project(self, x: Tensor, mask: Tensor | None = None) -> Product:
        """A bias by relative position, and a mask between the parts of windows that wrap around the image's edge."""
        q, k, v = self.split(self.attention.qkv(x))
        masks = [self.attention._get_rel_pos_bias()]
        if mask is not None:
            masks.append(mask.repeat(len(x) // len(mask), 1, 1).unsqueeze(1))
        return Product(q, k, v, tuple(masks))

    def refuse_first_values(self) -> str | None:
        """The same place in two windows is not the same token."""
        return WINDOWS_MOVE

    def refuse_average(self) -> str | None:
        """The authors' mean is the image's."""
        return WINDOWS_APART


class PyramidSite(TimmSite):
    """PVT v2's `Attention`: keys and values of a coarser grid."""

    def project(self, x: Tensor, feat_size: tuple[int, int]) -> Product:
        """Keys and values come from tokens that were merged on the grid, by a convolution or by pooling."""
        attention = self.attention
        q = attention.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if attention.sr is not None:
            grid = x.transpose(1, 2).reshape(len(x), -1, *feat_size)
            grid = grid if attention.pool is None else attention.pool(grid)
            x = attention.norm(attention.sr(grid).flatten(2).transpose(1, 2))
            x = x if attention.pool is None else attention.act(x)
        k, v = attention.kv(x).unflatten(-1, (2, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return Product(q, k, v)

    def refuse_first_values(self) -> str | None:
        """Even where a stage has as many keys as queries, the next one merges tokens."""
        return "it merges tokens between its stages, and before making keys and values, so v⁰, v and u do not match"


class TalkingSite(TimmSite):
    """CaiT's `TalkingHeadAttn`: heads are mixed before and after the softmax."""

    def project(self, x: Tensor) -> Product:
        """One projection for all three."""
        q, k, v = self.split(self.attention.qkv(x))
        return Product(q, k, v)

    def multiply(self, product: Product, v: Tensor) -> Tensor:
        """Head by head mixed logits, softmax, and mixed again."""
        attention = self.attention
        logits = (product.q * attention.scale) @ product.k.transpose(-2, -1)
        logits = attention.proj_l(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = attention.proj_w(logits.softmax(dim=-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed: Tensor = attention.attn_drop(weights) @ v
        return mixed

    def between(self) -> str | None:
        """Rows that were mixed after the softmax do not sum to one."""
        return "the mixing of heads"

    def operator(self, product: Product) -> AttentionOperator:
        """There is none; what does not ask for it, such as NeuTRENO, works all the same."""
        return cast(AttentionOperator, _NoOperator(self.name))


class _NoOperator:
    """Stands for A where attention is no softmax of one head's q and k; every token sees all."""

    mask = mask4 = None
    causal = False

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise AcutanceError(
            f"{self._name} mixes its heads before and after the softmax, so it has no attention operator per head: "
            "attention metrics and mitigations that use A cannot be had; token metrics can"
        )


def _joint_projection(attention: Any, x: Tensor) -> Tensor:
    """q, k and v in one; BEiT and EVA keep the biases of q and v beside the projection."""
    if getattr(attention, "q_bias", None) is None:
        joint: Tensor = attention.qkv(x)
        return joint
    bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    if attention.qkv_bias_separate:
        added: Tensor = attention.qkv(x) + bias
        return added
    return F.linear(x, attention.qkv.weight, bias)
