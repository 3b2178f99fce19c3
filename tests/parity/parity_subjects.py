"""The subjects of the matrix: a tiny model per library, and the plain formula for it."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F

import acutance as ac
from parity.parity_formula import Plain
from sites import tiny_models as tiny

# All have parameters, so that their gradients are compared too.
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

    A subclass has `library_model(heads)` and `inputs(generator, heads)`, a batch in float32.
    """

    name: str
    heads = ("multi-head",)
    refused: ClassVar = {("grouped-query", "eigen"): "a value head for every query head"}
    weights = ("attn.qkv.weight", "attn.proj.weight")  # paths in a block of W_V (or q, k and v in one) and of W_proj

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def has(self, heads: str) -> bool:
        """Whether the installed version of the library has such heads."""
        return True

    def blocks(self, model: nn.Module) -> nn.ModuleList | nn.Sequential:
        kinds = (nn.ModuleList, nn.Sequential)
        return next(part for part in model.modules() if isinstance(part, kinds) and len(part) == self.depth)

    def output(self, run: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Tensor:
        """The tensor that the loss depends on."""
        return run(*inputs.values())

    def plain_output(self, heads: str, state: dict[str, Tensor], inputs: dict[str, Tensor], **how: Any) -> Tensor:
        """The output by the plain formula, given the mitigated model's parameters by name; `how` is for `Plain`."""
        model = self.library_model(heads).to(next(iter(state.values())))
        plain = Plain(model, [attention_of(block) for block in self.blocks(model)], heads=HEADS, **how)
        return self.output(partial(plain, state), inputs)

    def checkpoint(self, model: nn.Module, reentrant: bool) -> None:
        """Recompute every block in the backward pass, here by torch's wrapper; a library may offer its own way."""
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        layers = self.blocks(model)
        for index, block in enumerate(layers):
            layers[index] = checkpoint_wrapper(block, kind)

    def mitigated(self, heads: str, mitigation: str = "all") -> nn.Module:
        """The model in float32 and training mode. No parameter has a value that could hide a mistake."""
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
        """Inputs that are the same in every process."""
        return self.inputs(torch.Generator().manual_seed(seed), heads)


def attention_of(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The attention of a block, and its W_proj."""
    attention = block.attn if hasattr(block, "attn") else block.self_attn
    return attention, next(getattr(attention, n) for n in ("proj", "out_proj", "o_proj") if hasattr(attention, n))


class Reference(Subject):
    """acutance.models, whose blocks take and return v⁰."""

    name = "acutance.models"

    def library_model(self, heads):
        return ac.models.ViT(**IMAGES, dim=DIM, depth=self.depth, heads=HEADS, num_classes=5, mlp_ratio=2)

    def inputs(self, generator, heads):
        return {"images": torch.randn(BATCH, 3, 8, 8, generator=generator)}

    def plain_output(self, heads, state, inputs, **how):
        """Class token and patches, positions, and torch's encoder, whose parameters have other names."""
        bias, stride = state["patch_embed.proj.bias"], IMAGES["patch_size"]
        x = F.conv2d(inputs["images"], state["patch_embed.proj.weight"], bias, stride=stride).flatten(2).transpose(1, 2)
        x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]
        renamed = {}
        for name, parameter in state.items():
            for ours, torchs in TORCHS.items():
                name = name.replace(ours, torchs)
            renamed[name] = parameter
        encoder = torch_encoder(self.depth, nn.LayerNorm(DIM, 1e-6), layer_norm_eps=1e-6).to(x)
        layers = [attention_of(block) for block in encoder.layers]
        x = Plain(encoder, layers, heads=HEADS, **how)(renamed, x)
        return F.linear(x[:, 0], state["head.weight"], state["head.bias"])

    def checkpoint(self, model, reentrant):
        if reentrant:
            super().checkpoint(model, reentrant)
        else:
            model.set_grad_checkpointing()


TORCHS = {"blocks.": "layers.", "attn.": "self_attn.", "qkv.": "in_proj_", ".proj.": ".out_proj.", "mlp.fc": "linear"}


def torch_encoder(depth: int, norm: nn.Module | None = None, **options: float) -> nn.TransformerEncoder:
    sizes = {"d_model": DIM, "nhead": HEADS, "dim_feedforward": 2 * DIM, "dropout": 0.0, **options}
    layer = nn.TransformerEncoderLayer(**sizes, activation="gelu", norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)


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

    def plain_output(self, heads, state, inputs, **how):
        written_out = super().plain_output if heads == "multi-head" else super(Reference, self).plain_output
        return written_out(heads, state, inputs, **how)


class Torch(Subject):
    name = "torch.nn"
    weights = ("self_attn.in_proj_weight", "self_attn.out_proj.weight")

    def library_model(self, heads):
        ends = {"embed": nn.Linear(5, DIM), "head": nn.Linear(DIM, 3)}
        run = lambda self, x: self.head(self.body(self.embed(x)))  # noqa: E731
        return tiny.Made(run, **ends, body=self.body(heads))

    def body(self, heads):
        return torch_encoder(self.depth)

    def inputs(self, generator, heads):
        return {"x": torch.randn(BATCH, 7, 5, generator=generator)}


class Transformers(Subject):
    """transformers' CLIP vision encoder, and Llama for grouped queries."""

    name = "transformers"
    heads = ("multi-head", "grouped-query")
    weights = ("self_attn.v_proj.weight", "self_attn.out_proj.weight")
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

    def checkpoint(self, model, reentrant):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _all_of(output) -> Tensor:
    """The output with the pooled token, which CLIP normalises with its own parameters."""
    pooled = output.get("pooler_output")
    return output.last_hidden_state if pooled is None else torch.cat([output.last_hidden_state, pooled[:, None]], 1)


class Written(Torch):
    """Models of no library, whose attention is intercepted: torch's function, or a softmax with fewer key heads."""

    name = "hand-written"
    heads = ("multi-head", "grouped-query")
    weights = ("attn.v_proj.weight", "attn.out_proj.weight")

    def body(self, heads):
        form, key_heads = (tiny.sdpa, HEADS) if heads == "multi-head" else (tiny.softmax, HEADS // 2)
        sizes = {"dim": DIM, "heads": HEADS, "key_heads": key_heads, "width": DIM // HEADS}
        return nn.Sequential(*(tiny.block(tiny.separate_attention(form, **sizes), dim=DIM) for _ in range(self.depth)))


SUBJECTS: dict[str, type[Subject]] = {cls.name: cls for cls in (Reference, Transformers, Torch, Timm, Written)}


@cache
def subject_of(library: str, depth: int) -> Subject:
    """One object per library and depth, so that caches are shared."""
    return SUBJECTS[library](depth)
