"""Sites whose weights are found by the usual names, and whose norms and gains are found by running the block once.

Models of no known library are read by them too: blocks told by structure, attention by its name.
"""

import re
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import TOKENS_REMAIN, AcutanceError, NoSitesError
from acutance.mitigations import LayerShape
from acutance.mitigations.projection import Projection, Projections
from acutance.sites import structure
from acutance.sites.discovery import Surroundings, discover, is_norm, same_values
from acutance.sites.patched import PatchedSite
from acutance.sites.scans import scan_of
from acutance.sites.site import Library, Stages
from acutance.sites.structure import ADVICE, Layer, modules_of, path_of

NAMES = {
    "query": ("q_proj", "query", "query_proj", "q_lin", "q", "to_q", "wq", "q_linear", "W_q", "Wq"),
    "key": ("k_proj", "key", "key_proj", "k_lin", "k", "to_k", "wk", "k_linear", "W_k", "Wk"),
    "value": ("v_proj", "value", "value_proj", "v_lin", "v", "to_v", "wv", "v_linear", "W_v", "Wv"),
    # One projection for all three, or for keys and values: its rows stand query by key by value, or so head by head.
    "joint": ("c_attn", "qkv_proj", "Wqkv", "qkv", "to_qkv", "in_proj"),
    "joint by head": ("query_key_value",),
    "keys and values": ("kv", "to_kv"),
}
OUTPUT = (
    *("o_proj", "out_proj", "out_lin", "o", "c_proj", "Wo", "dense", "proj", "projection"),
    *("to_out.0", "to_out", "wo", "W_o", "out", "output_proj", "out_linear"),
)
OUTPUT_BESIDE = ("output.dense", "output", "dense")  # in the module around the attention, as BERT has it
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads")
ATTENTION = re.compile("attention|attn|mhsa", re.IGNORECASE)


class NamedSite(PatchedSite):
    """One attention. Its weights are looked up when asked for: reading tokens needs none of them."""

    checked = 0  # how many of W_V and W_proj are tried on random tokens

    @cached_property
    def _found(self) -> tuple[Projections, LayerShape]:
        """Look the usual names up; what is missing is an error that says so."""
        attention, output = self.attention, NamedSite.output_projection(self)
        found = {kind: module for kind, names in NAMES.items() if (module := _child(attention, names)) is not None}
        source = next((kind for kind in ("value", "joint", "joint by head", "keys and values") if kind in found), None)
        config = getattr(attention, "config", None)
        said = (*(getattr(attention, key, None) for key in HEADS), getattr(config, "num_attention_heads", None))
        heads = next((number for number in said if isinstance(number, int)), None)
        if output is None or heads is None or source is None:
            missing = "W_proj" if output is None else "W_V" if source is None else "the number of heads"
            kept = f"{self.name} ({type(attention).__name__}) keeps {missing} under a name that is not known here"
            raise NoSitesError(f"{kept}, or has none. {TOKENS_REMAIN}")
        dim, width = Projection(output).shape()
        head_dim = width // heads
        query, key, value = (Projection(found[kind]) if kind in found else None for kind in ("query", "key", "value"))
        query_heads, parts = heads if "joint" in source else 0, 1 if source == "value" else 2
        count = Projection(found[source]).shape()[0]
        kv_heads = (count // head_dim - query_heads) // parts
        if value is None:
            # Falcon's and GPT-BigCode's may stand so that each key head follows its query heads.
            by_head = source == "joint by head" or getattr(attention, "multi_query", None) is False
            groups = kv_heads if by_head else 1
            counts = (heads // kv_heads, 1, 1) if by_head else (query_heads, kv_heads, kv_heads)
            rows = torch.arange(count, device="cpu").reshape(groups, -1, head_dim).split(counts, dim=1)
            q, key, value = (Projection(found[source], part.flatten()) for part in rows)
            query = q if query_heads else query
        shape = LayerShape(self.layer, dim, heads, head_dim, kv_heads)
        return Projections(query, key, value, Projection(output)), shape

    heads: Any = property(lambda self: self._found[1].heads)
    kv_heads: Any = property(lambda self: self._found[1].kv_heads)
    head_dim: Any = property(lambda self: self._found[1].head_dim)
    dim: Any = property(lambda self: self._found[1].dim)

    def projections(self) -> Projections:
        return self._verified if self.checked else self._found[0]

    @cached_property
    def _verified(self) -> Projections:
        """Names promise nothing: where the attention runs on random tokens, it must do what the weights say."""
        found, seen = self._found[0], self._seen
        if self.block is self.attention or not seen.keys() >= {"v", "y"} or seen["x"].shape[2:] != (self.dim,):
            if self.block is not self.attention and found.value.rows is not None and not found.value.matrix().is_meta:
                raise self._unknown("the order of the rows of its joint projection")
            return found
        copies = max(1, seen["v"].shape[1] // self.kv_heads)  # of each head of the values, where the model makes some
        pairs = (found.value, seen["x"], seen["v"][:, ::copies]), (found.output, seen["u"], seen["y"])
        for projection, x, y in pairs[: self.checked]:
            given, made = (t.transpose(1, 2).flatten(2) if t.ndim == 4 else t for t in (x, y))
            wanted = F.linear(given, projection.matrix(), projection.offset())
            if self.checked == 1:  # an adapter keeps the bias to itself
                made, wanted = (t - t.mean((0, 1)) for t in (made, wanted))
            near = torch.finfo(wanted.dtype).eps ** 0.5
            is_alike = made.shape == wanted.shape and torch.allclose(made, wanted, near, near, equal_nan=True)
            if not is_alike and (self.checked == 2 or made.shape[1] == wanted.shape[1]):  # fewer were merged, as in PVT
                what = f"{self.name} ({type(self.attention).__name__}) does more than multiply by W_V and W_proj"
                raise NoSitesError(f"{what}, or has their rows in another order. {ADVICE}. {TOKENS_REMAIN}")
        return found

    def output_projection(self) -> nn.Module | None:
        """W_proj, which BERT and others keep beside the attention; None under an unknown name."""
        found = _child(self.attention, OUTPUT)
        for path in structure.outwards(path_of(self.block, self.attention))[1:-1]:
            found = found or _child(self.block.get_submodule(path), OUTPUT_BESIDE)
        return found

    @cached_property
    def surroundings(self) -> Surroundings:
        return discover(self.block, self.attention, self._found[0].output, self.dim)

    @cached_property
    def _seen(self) -> dict[str, Any]:
        """What the attention did on random tokens, in its block or else in the whole stack."""
        seen = self.surroundings.seen
        if "merged" in seen:
            return seen
        return discover(self.block, self.attention, self._found[0].output, self.dim, self.stack.root).seen

    def pre_norm(self) -> nn.Module | None:
        """The norm before the attention; None in Post-LN models such as BERT."""
        source = self.surroundings.source
        if source is None and any(map(is_norm, self.block.modules())):
            raise self._unknown("which of its norms comes before the attention")
        return None if source is self.block else source

    def pre_norm_gain(self) -> Tensor | None:
        """The norm's weight; Gemma's norms, and some others, multiply by 1 + weight."""
        gain, norm = super().pre_norm_gain(), self.pre_norm()
        if gain is None or norm is None:
            return None
        if isinstance(norm, nn.modules.batchnorm._NormBase):
            what = "norms over samples, so there is no weight that H could be multiplied by"
            raise AcutanceError(f"{self.name}: the {type(norm).__name__} before it {what}. {ADVICE}")
        token = 1 - 2 * (torch.arange(gain.shape[-1], device=gain.device) % 2).to(gain.dtype)  # is normalised already
        with torch.no_grad():
            made = token * (norm.forward(token) - norm.forward(-token)) / 2  # without its bias
            adds_one = (made - gain).abs().sum() > (made - 1 - gain).abs().sum()
        return 1 + gain if adds_one else gain

    def between(self) -> str | None:
        """Mixed heads, as in CaiT, or a norm or a gate between the attention and W_proj, as in BitNet and Qwen3-Next.

        The first layer whose attention is of the same class is tried. Where it does not run, a norm inside counts.
        """
        first: Any = next(site for site in self.stack.sites if type(site.attention) is type(self.attention))
        seen, changes = first._seen, any(map(is_norm, self.attention.modules()))
        if seen.get("is_mixed"):
            return "the mixing of heads"
        if "merged" in seen:
            changes = not same_values(seen["u"], seen["merged"])
        return f"a norm or a gate of {type(self.attention).__name__} before W_proj" if changes else None

    def post_norm(self) -> nn.Module | None:
        return self._followed().post_norm

    def branch_gain(self) -> Tensor | None:
        """LayerScale's gain, or one number for all channels, as ReZero and Granite have."""
        gain = self._followed().gain
        if isinstance(gain, (int, float)):
            gain = self.projection_weight().new_tensor(gain)
        return gain if gain is None or gain.shape == (self.dim,) else gain.flatten().expand(self.dim)

    def stages(self) -> Stages | None:
        """As the run of the block shows them, which leaves cross-attention out: that is found by its name."""
        known, own = self.surroundings.stages, path_of(self.block, self.attention)
        crosses = [path for path in modules_of(self.block) if structure.CROSS.search(path) and not path.startswith(own)]
        return known._replace(rest="rest") if known is not None and crosses else known

    def _followed(self) -> Surroundings:
        if not self.surroundings.is_complete:
            raise self._unknown("what it does to the attention's output")
        return self.surroundings

    def _unknown(self, what: str) -> AcutanceError:
        return AcutanceError(
            f"{self.name}: {type(self.block).__name__} does not run on random tokens, so {what} is not known. {ADVICE}"
        )


def _child(module: nn.Module, paths: tuple[str, ...]) -> nn.Module | None:
    inside = dict(module.named_modules(remove_duplicate=False))
    found = ((path, inside[path]) for path in paths if path in inside)
    holders = ("output", "to_out")  # of output.dense and to_out.0, where they are no linear layer themselves
    return next(
        (part for path, part in found if path not in holders or isinstance(getattr(part, "weight", None), Tensor)), None
    )


class AnybodySite(NamedSite):
    """An attention that nobody described: what it returns is the branch's output."""

    checked = 2

    def output_projection(self) -> nn.Module | None:
        """Asked for only where the attention is written into its block."""
        return super().output_projection() if self.block is self.attention else None

    def refuse_first_values(self) -> str | None:
        """Other shapes show in a forward pass; that lists side by side follow one another is not known."""
        stages = {site.stage.rpartition(".") for site in self.stack.sites}
        is_beside = len({around for around, _, _ in stages}) == 1 and not any(name.isdigit() for _, _, name in stages)
        return super().refuse_first_values() if len(stages) > 1 and is_beside else None


def _layers(model: nn.Module) -> list[Layer]:
    blocks = structure.blocks_in_order(model)
    seen = (_attention_of(path, block) for path, block in blocks.items())
    found = [None if attention is None or scan_of(attention) is not None else attention for attention in seen]
    return [
        Layer(layer, path_of(model, attention), block, attention, structure.parent_of(path))
        for layer, ((path, block), attention) in enumerate(zip(blocks.items(), found, strict=True), 1)
        if attention is not None and None not in found  # blocks without attention need a library of their own
    ]


def _attention_of(path: str, block: nn.Module) -> nn.Module | None:
    """The innermost module that is called an attention, or the block itself where it holds the projections."""
    named = {  # by its class, or by where it stands; a norm or dropout of an attention has no parts
        name: module
        for name, module in modules_of(block).items()
        if name and ATTENTION.search(f"{type(module).__name__} {name.rpartition('.')[2]}")
        if module._modules.keys() - {structure.PARAMETRIZATIONS}
    }
    if inner := structure.innermost(named):
        return inner[structure.self_attention_in(path, inner)]
    return block if block._modules.keys() & {*NAMES["joint"], *NAMES["value"]} else None


LIBRARY = Library(
    name="any model whose blocks are a list",
    generality=3,
    layers=_layers,
    site=AnybodySite,
    is_watched=lambda model: True,
)
