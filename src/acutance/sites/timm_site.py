"""Where timm's attention classes keep their weights, and what is special to some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.mitigations.projection import Projection, Projections
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.intercept import Product, sdpa_product
from acutance.sites.named import NamedSite
from acutance.sites.patched import WINDOWS_APART, WINDOWS_MOVE

PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop", "mitigation"}
POST_NORM = {"ResPostBlock", "ResPostRelPosBlock", "EvaBlockPostNorm"}  # norm1 stands after their attention


class TimmSite(NamedSite):
    """The attention of one block."""

    block: Any
    attention: Any

    stage = ""  # path of the container that holds the block
    is_known = False  # whether its forward is written out below

    def route(self) -> Callable[[], None]:
        """By a forward of our own where we know the class, else intercepted."""
        self.is_known = _is_plain_attention(self.attention)
        return super().route()

    def _run(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """timm's `Attention`, operation for operation: faster than looking at each of them."""
        attention = self.attention
        if not (self.is_known and self.is_active and attention.fused_attn):
            return super()._run(x, args, kwargs)
        now = self.now(x)
        now.entering = x
        u = self.attend(_product(attention, *args, **kwargs))
        y: Tensor = attention.proj(attention.norm(u.transpose(1, 2).reshape(*x.shape[:2], -1)))
        return attention.proj_drop(y)

    def _refuse_idle_adapter(self) -> None:
        """BEiT and EVA take the weight of their joint projection, past whatever was put around it."""
        joint, beside = getattr(self.attention, "qkv", None), getattr(self.attention, "q_bias", None)
        adapted = beside is not None and joint is not None and Projection(joint).is_adapted
        if adapted and not self.attention.qkv_bias_separate:
            raise NoSitesError(
                f"{self.name} multiplies by the weight of its qkv itself, so the {type(joint).__name__} around it does "
                f"nothing there: merge it into the layer, or put it around proj alone. {TOKENS_REMAIN}"
            )

    def between(self) -> str | None:
        """A norm or a gate, which are functions of the tokens; heads that are mixed."""
        norm, gate = getattr(self.attention, "norm", None), getattr(self.attention, "gate", None)
        if hasattr(self.attention, "proj_w"):
            return "the mixing of heads"  # after which rows do not sum to one
        has_norm = norm is not None and not isinstance(norm, nn.Identity) and not hasattr(self.attention, "sr")
        parts = [f"a {type(norm).__name__}"] if has_norm else []
        parts += [] if gate is None else ["a gate"]
        return f"{' and '.join(parts)} before W_proj" if parts else None

    def refuse_first_values(self) -> str | None:
        """Windows move; stages merge or rearrange their tokens."""
        if _has_windows(self.attention):
            return WINDOWS_MOVE
        if hasattr(self.attention, "sr"):  # PVT v2: even where a stage has as many keys as queries, the next merges
            return "it merges tokens between its stages, and before making keys and values, so v⁰, v and u do not match"
        stages = list(dict.fromkeys(cast(TimmSite, site).stage for site in self.stack.sites))
        if len(stages) > 1:
            return f"its layers are in several stages ({', '.join(stages)}), which do not share their tokens"
        return None

    def refuse_average(self) -> str | None:
        """The authors' mean is the image's."""
        return WINDOWS_APART if _has_windows(self.attention) else None

    def projections(self) -> Projections:
        """By their names; BEiT and EVA keep the biases of q and v beside the projection."""
        self._refuse_idle_adapter()
        found = super().projections()
        if getattr(self.attention, "v_bias", None) is None:
            return found
        beside = replace(found.value, bias="v_bias", bias_rows=slice(None), bias_module=self.attention)
        return found._replace(value=beside)

    def pre_norm(self) -> nn.Module | None:
        """norm1, unless it stands after the attention."""
        kind = type(self.block)
        if not kind.__module__.startswith("timm."):
            raise AcutanceError(f"{self.name}: which norm {kind.__name__} applies before its attention is not known")
        return None if kind.__name__ in POST_NORM else self.block.norm1


def _is_plain_attention(attention: nn.Module) -> bool:
    """Whether it is the class that we know, and has no part that we do not."""
    cls = next(cls for cls in type(attention).__mro__ if "forward" in vars(cls))
    known = cls.__module__ == "timm.layers.attention" and cls.__qualname__ == "Attention"
    return known and PARTS.issuperset(attention._modules)


def _product(attention: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Product:
    by_head = attention.qkv(x).reshape(*x.shape[:2], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = by_head.unbind(0)
    dropout = attention.attn_drop.p if attention.training else 0.0
    options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout, "is_causal": is_causal}
    return sdpa_product(x, attention.q_norm(q), attention.k_norm(k), v, **options)


def _has_windows(attention: nn.Module) -> bool:
    return type(attention).__name__ == "WindowAttention"
