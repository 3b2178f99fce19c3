"""Models of timm, and anybody's models that are built of timm's blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from acutance.errors import TOKENS_REMAIN, NoSitesError
from acutance.mitigations.projection import Projection, Projections
from acutance.sites import find, structure
from acutance.sites.intercept import sdpa_product
from acutance.sites.named import NamedSite
from acutance.sites.site import Library
from acutance.sites.structure import Layer, SpecialTokens, modules_of

# Attentions whose layers are numbered and whose weights are read here, by the class that wrote their forward.
PLAIN = "timm.layers.attention.Attention"
KNOWN = {
    *(PLAIN, "timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention"),
    *("timm.models.beit.Attention", "timm.models.vision_transformer_relpos.RelPosAttention"),
    *("timm.models.swin_transformer.WindowAttention", "timm.models.pvt_v2.Attention"),
    "timm.models.cait.TalkingHeadAttn",
}
PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop", "mitigation"}  # of the plain one


class TimmSite(NamedSite):
    """The attention of one block."""

    attention: Any
    is_plain = False  # whether its forward is written out below

    def route(self) -> None:
        self.is_plain = _author(self.attention) == PLAIN and PARTS.issuperset(self.attention._modules)
        super().route()

    def _run(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.is_plain and self.is_active and self.attention.fused_attn:
            return self._written_out(*args, **kwargs)
        return super()._run(x, args, kwargs)

    def _written_out(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        """timm's `Attention`, operation for operation: faster than looking at each of them."""
        self.now(x)
        attention = self.attention
        q, k, v = attention.qkv(x).reshape(*x.shape[:2], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = attention.attn_drop.p if attention.training else 0.0
        u = self.attend(sdpa_product(x, attention.q_norm(q), attention.k_norm(k), v, attn_mask, dropout, is_causal))
        return attention.proj_drop(attention.proj(attention.norm(u.transpose(1, 2).reshape(*x.shape[:2], -1))))

    def projections(self) -> Projections:
        """By their names; BEiT and EVA keep the biases of q and v beside the projection."""
        joint = getattr(self.attention, "qkv", None)
        multiplies = getattr(self.attention, "q_bias", None) is not None and not self.attention.qkv_bias_separate
        if multiplies and joint is not None and Projection(joint).is_adapted:
            raise NoSitesError(
                f"{self.name} multiplies by the weight of its qkv itself, so the {type(joint).__name__} around it does "
                f"nothing there: merge it into the layer, or put it around proj alone. {TOKENS_REMAIN}"
            )
        found = super().projections()
        if getattr(self.attention, "v_bias", None) is None:
            return found
        return found._replace(value=replace(found.value, bias=(self.attention, "v_bias", None)))


def _author(attention: nn.Module) -> str:
    """The class that wrote the forward: a subclass with a forward of its own is another."""
    cls = next(cls for cls in type(attention).__mro__ if "forward" in vars(cls))
    return f"{cls.__module__}.{cls.__qualname__}"


def _layers(model: nn.Module) -> list[Layer]:
    modules = modules_of(model)
    found = {path: module for path, module in modules.items() if _author(module) in KNOWN}
    if found and any(type(module).__name__ == "CrossVit" for module in modules.values()):
        raise NoSitesError("the layers of CrossVit run in branches side by side, so they have no one order")
    layers = structure.layers_in(model, found)
    beside = next((layer.name for layer in layers if isinstance(layer.block, structure.CONTAINERS)), None)
    if beside is not None:
        raise NoSitesError(f"{beside} stands beside others in one layer: mitigations and measures are not made for it")
    return layers


def _special_tokens(model: nn.Module) -> SpecialTokens:
    """As the model says, or else by the names that timm gives such tokens."""
    root: Any = model if hasattr(model, "num_prefix_tokens") else cast(TimmSite, find(model)[0]).stack.root
    if hasattr(root, "num_prefix_tokens"):
        return SpecialTokens(int(root.num_prefix_tokens))
    if type(root).__name__ == "Cait":  # its class token joins the others after these layers
        return SpecialTokens()
    return structure.tokens_by_name(root.named_parameters(recurse=False))


LIBRARY = Library(
    name="timm",
    generality=1,
    layers=_layers,
    site=TimmSite,
    special_tokens=_special_tokens,
)
