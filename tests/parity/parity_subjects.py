"""What is put into the matrix: a tiny model per library, and the plain formula for it."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from typing import ClassVar

import torch
from parity_formula import Names, attend, embed_patches, encode, learnt, rescale, rotate, use_formula
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F

import acutance as ac

# All learn, so that their gradients are compared too.
SPECS = {
    "attnscale": "attnscale",
    "neutreno": "neutreno:0.6,learn=head",
    "featscale": "featscale",
    "eigen": "eigen:negative,basis=cayley",
}
MITIGATIONS = (*SPECS, "all")
DIM, HEADS, BATCH = 32, 4, 4
IMAGES = {"image_size": 8, "patch_size": 4}


class Subject:
    """One library's model.

    A subclass has `library_model(heads)`; `inputs(generator, heads)`, a batch in float32, of which float64 has every
    number too; and `plain_output(heads, state, inputs, cut)` by the plain formula, given the mitigated model's
    parameters by name.
    """

    name: str
    heads = ("multi-head",)
    refused: ClassVar = {("grouped-query", "eigen"): "a value head for every query head"}
    weights = ("qkv.weight", "proj.weight")  # of W_V, or q, k and v in one, and of W_proj in an attention

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def has(self, heads: str) -> bool:
        """Whether the version of the library that is installed has them."""
        return True

    def blocks(self, model: nn.Module) -> nn.ModuleList | nn.Sequential:
        """The list of the model's blocks."""
        kinds = (nn.ModuleList, nn.Sequential)
        return next(part for part in model.modules() if isinstance(part, kinds) and len(part) == self.depth)

    def output(self, run: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Tensor:
        """What the loss is made of."""
        return run(*inputs.values())

    def checkpoint(self, model: nn.Module, reentrant: bool) -> None:
        """Recompute every block in the backward pass; here by torch's wrapper, as for libraries that offer nothing."""
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        layers = self.blocks(model)
        for index, block in enumerate(layers):
            layers[index] = checkpoint_wrapper(block, kind)

    def mitigated(self, heads: str, mitigation: str = "all") -> nn.Module:
        """The model in float32 and training mode, all parameters away from what would hide a mistake."""
        torch.manual_seed(0)
        model = self.library_model(heads).train()
        taken = {name: spec for name, spec in SPECS.items() if (heads, name) not in self.refused}
        ac.mitigate(model, "+".join(taken.values()) if mitigation == "all" else SPECS[mitigation])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("learnt_strength"):
                    parameter.uniform_(1.0, 2.0)
                elif parameter.ndim > 1:
                    parameter.normal_(std=0.15)
                else:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    def batch(self, seed: int, heads: str) -> dict[str, Tensor]:
        """Inputs that every process makes alike."""
        return self.inputs(torch.Generator().manual_seed(seed), heads)


class Reference(Subject):
    """acutance.models, whose blocks pass v⁰ on in their signature."""

    name = "acutance.models"
    names = Names("blocks.", "attn", "qkv.", "proj", "mlp.fc1", "mlp.fc2")

    def library_model(self, heads):
        return ac.models.ViT(**IMAGES, dim=DIM, depth=self.depth, heads=HEADS, num_classes=5, mlp_ratio=2)

    def inputs(self, generator, heads):
        return {"images": torch.randn(BATCH, 3, 8, 8, generator=generator)}

    def plain_output(self, heads, state, inputs, cut):
        x = embed_patches(state, inputs["images"], IMAGES["patch_size"])
        x = encode(state, x, heads=HEADS, depth=self.depth, names=self.names, eps=1e-6, cut=cut)
        return F.linear(x[:, 0], state["head.weight"], state["head.bias"])

    def checkpoint(self, model, reentrant):
        if reentrant:
            super().checkpoint(model, reentrant)
        else:
            model.set_grad_checkpointing()


class Timm(Reference):
    """timm's VisionTransformer, whose parameters have the same names, and its Eva for grouped queries."""

    name = "timm"
    heads = ("multi-head", "grouped-query")

    def has(self, heads):
        from timm.layers import AttentionRope

        return heads == "multi-head" or "num_kv_heads" in signature(AttentionRope).parameters

    def library_model(self, heads):
        with suppress(ImportError):  # where torch is the CPU build, tests/with_timm has it
            import torchvision_without_operators  # noqa: F401
        from timm.models import Eva, VisionTransformer

        sizes = {"embed_dim": DIM, "depth": self.depth, "num_heads": HEADS, "num_classes": 5, "mlp_ratio": 2}
        sizes |= {"img_size": IMAGES["image_size"], "patch_size": IMAGES["patch_size"]}
        if heads == "multi-head":
            return VisionTransformer(**sizes)
        return Eva(**sizes, attn_type="rope", use_rot_pos_emb=True, qkv_fused=False, num_kv_heads=HEADS // 2)

    def plain_output(self, heads, state, inputs, cut):
        """Of Eva the library's model with an attention that is written out and keeps v⁰ in a dictionary."""
        if heads == "multi-head":
            return super().plain_output(heads, state, inputs, cut)
        return written_out(self.library_model(heads), "proj", state, inputs, cut)


def written_out(model, projection, state, inputs, cut):
    """The model with an attention that keeps v⁰ in a dictionary: its W_proj is called so, rotation comes by `rope`."""
    model, first = model.to(next(iter(state.values()))), {}

    def attention(layer, module, x, rope=None, **_):
        own, parts = learnt(state, f"blocks.{layer - 1}.attn"), (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (part(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in parts)
        q, k = (q, k) if rope is None else (rotate(q, rope), rotate(k, rope))
        u = attend(q, k, v, first.setdefault("v", v), own, cut=layer == cut)
        return rescale(module.get_submodule(projection)(u.transpose(1, 2).flatten(2)), own)

    for layer, block in enumerate(model.blocks, 1):
        block.attn.forward = partial(attention, layer, block.attn)
    return by_state(model, state, *inputs.values())


def by_state(model, state, *args, **kwargs):
    """Run with these parameters, those that mitigations learn left out."""
    own = {name: value for name, value in state.items() if "mitigation" not in name}
    return torch.func.functional_call(model, own, args, kwargs)


class Between(nn.Module):
    """A stack of blocks between two linear maps, `embed` and `head`."""

    def __init__(self, stack: str, **parts: nn.Module) -> None:
        super().__init__()
        self.stack = stack
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(getattr(self, self.stack)(self.embed(x)))


class Torch(Subject):
    """torch.nn."""

    name = "torch.nn"
    names = Names("encoder.layers.", "self_attn", "in_proj_", "out_proj", "linear1", "linear2")
    weights = ("in_proj_weight", "out_proj.weight")

    def library_model(self, heads):
        sizes = {"d_model": DIM, "nhead": HEADS, "dim_feedforward": 2 * DIM, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(**sizes, activation="gelu", norm_first=True, batch_first=True)
        embed, encoder = nn.Linear(5, DIM), nn.TransformerEncoder(layer, self.depth, enable_nested_tensor=False)
        return Between("encoder", embed=embed, encoder=encoder, head=nn.Linear(DIM, 3))

    def inputs(self, generator, heads):
        return {"x": torch.randn(BATCH, 7, 5, generator=generator)}

    def plain_output(self, heads, state, inputs, cut):
        x = F.linear(inputs["x"], state["embed.weight"], state["embed.bias"])
        x = encode(state, x, heads=HEADS, depth=self.depth, names=self.names, cut=cut)
        return F.linear(x, state["head.weight"], state["head.bias"])


class Transformers(Subject):
    """transformers' CLIP vision encoder, and Llama for grouped queries."""

    name = "transformers"
    heads = ("multi-head", "grouped-query")
    weights = ("v_proj.weight", "out_proj.weight")
    refused: ClassVar = Subject.refused | {("grouped-query", "featscale"): "would show them the future"}
    padded = True  # flash attention on CUDA takes no masks

    def library_model(self, heads):
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaModel

        sizes = {"hidden_size": DIM, "num_hidden_layers": self.depth, "intermediate_size": 2 * DIM}
        if heads == "multi-head":
            return CLIPVisionModel(CLIPVisionConfig(**sizes, **IMAGES, num_attention_heads=HEADS))
        groups = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
        text = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
        return LlamaModel(LlamaConfig(**sizes, **groups, **text, max_position_embeddings=32))

    def inputs(self, generator, heads):
        if heads == "multi-head":
            return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator)}
        ids = torch.randint(3, 60, (BATCH, 9), generator=generator)
        if not self.padded:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        mask[1::2, 7:] = 0  # one in every half of the batch
        return {"input_ids": ids, "attention_mask": mask}

    def output(self, run, inputs):
        return _all_of(run(**inputs))

    def plain_output(self, heads, state, inputs, cut):
        """The library's model with an attention function that keeps v⁰ in a dictionary."""
        model = self.library_model(heads).to(next(iter(state.values())))
        output = "out_proj" if heads == "multi-head" else "o_proj"
        names = {module: name for name, module in model.named_modules()}
        layers = [(b.self_attn, getattr(b.self_attn, output)) for b in self.blocks(model)]
        use_formula(model, layers, [learnt(state, names[attention]) for attention, _ in layers], cut=cut)
        return _all_of(by_state(model, state, **inputs))

    def checkpoint(self, model, reentrant):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _all_of(output) -> Tensor:
    """The pooled token too, which CLIP normalises with parameters of its own."""
    pooled = output.get("pooler_output")
    return output.last_hidden_state if pooled is None else torch.cat([output.last_hidden_state, pooled[:, None]], 1)


class WrittenAttention(nn.Module):
    """By `scaled_dot_product_attention`, or, with fewer key heads, by a softmax that is written out."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = HEADS, groups
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM // by) for by in (1, groups, groups))
        self.out_proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in parts)
        if self.groups == 1:
            u = F.scaled_dot_product_attention(q, k, v)
        else:
            k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
            u = F.softmax(q @ k.transpose(-2, -1) / (DIM // HEADS) ** 0.5, dim=-1).to(v.dtype) @ v
        return self.out_proj(u.transpose(1, 2).flatten(2))


class WrittenBlock(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), WrittenAttention(groups), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Written(Torch):
    """Models of no library, whose attention is intercepted."""

    name = "hand-written"
    heads = ("multi-head", "grouped-query")
    weights = Transformers.weights

    def library_model(self, heads):
        ends = {"embed": nn.Linear(5, DIM), "head": nn.Linear(DIM, 3)}
        groups = 1 if heads == "multi-head" else 2
        return Between("blocks", **ends, blocks=nn.Sequential(*(WrittenBlock(groups) for _ in range(self.depth))))

    def plain_output(self, heads, state, inputs, cut):
        return written_out(self.library_model(heads), "out_proj", state, inputs, cut)


SUBJECTS: dict[str, type[Subject]] = {cls.name: cls for cls in (Reference, Transformers, Torch, Timm, Written)}


@cache
def subject_of(library: str, depth: int) -> Subject:
    """One object for each, so that what is known of it is found again."""
    return SUBJECTS[library](depth)
