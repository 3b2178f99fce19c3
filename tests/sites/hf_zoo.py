"""Tiny transformers models with random weights, one per architecture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sites.tiny_models import recorded

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MARKS = {"bos_token_id": 1, "eos_token_id": 2}
TEXT = SIZES | {"vocab_size": 60, "max_position_embeddings": 64}
DECODER = TEXT | ENDS | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 1, "experts_implementation": "eager"}  # other implementations have no float64
MOE = DECODER | EXPERTS | {"num_experts": 2, "moe_intermediate_size": 16}
OPT = TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32}
MODERNBERT = DECODER | {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8}
VISION = SIZES | {"image_size": 16, "patch_size": 4, "num_channels": 3}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 60}
T5 |= {"decoder_start_token_id": 0}
BART = {"d_model": 32, "vocab_size": 60, "max_position_embeddings": 64, **ENDS}
BART |= {"forced_eos_token_id": None, "decoder_start_token_id": 1}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 3, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
WHISPER = BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "vocab_size": 60, "n_positions": 64, **ENDS}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2]}
DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60}
ROBERTAS = {"roberta": "Roberta", "xlm_roberta": "XLMRoberta", "camembert": "Camembert"}
TOWERS = {"text_config": TEXT | MARKS, "vision_config": VISION}


@dataclass(frozen=True)
class Entry:
    model: str
    options: dict[str, Any] = field(default_factory=TEXT.copy)
    kind: str = "text"  # text, image, both, sound or seq2seq
    part: str | None = None  # of models with several stacks
    prefix: int = 0
    heads: tuple[tuple[int, int], ...] = ((4, 4),) * 3  # layer by layer, with those of the values
    pre_norm: bool = True
    first_values: bool = True  # whether v⁰ can be used
    causal: bool = False


def _causal(model, options=DECODER, kv_heads=2, **more):
    return Entry(model, options, heads=((4, kv_heads),) * 3, causal=True, **more)


def _image(model, options=VISION, **more):
    return Entry(model, options, kind="image", **more)


def _two(model, part, options=BART, kind="seq2seq", **more):
    return Entry(model, options, kind, part, causal=part == "decoder", **more)


ZOO: dict[str, Entry] = {
    "vit": _image("ViT", prefix=1),
    "deit": _image("DeiT", prefix=2),
    "beit": _image("Beit", VISION | {"use_relative_position_bias": True}, prefix=1),
    "vit_mae": _image("ViTMAE", VISION | {"mask_ratio": 0.0}, prefix=1),
    "vit_msn": _image("ViTMSN", prefix=1),
    "ijepa": _image("IJepa"),
    "dinov2": _image("Dinov2", prefix=1),
    "dinov2_registers": _image("Dinov2WithRegisters", VISION | {"num_register_tokens": 3}, prefix=4),
    "dinov3": _image("DINOv3ViT", VISION | {"num_register_tokens": 2}, prefix=3),
    "dpt": _image("DPT", prefix=1),
    "yolos": _image("Yolos", VISION | {"image_size": [16, 16], "num_detection_tokens": 3}, prefix=1),
    "aimv2": _image("Aimv2Vision"),
    "clip_vision": _image("CLIPVision", prefix=1),
    "siglip_vision": _image("SiglipVision"),
    "swin": _image("Swin", SWIN, heads=((2, 2),) * 2 + ((4, 4),) * 2, first_values=False),
    "segformer": _image("Segformer", SEGFORMER, heads=((2, 2), (4, 4), (4, 4)), first_values=False),
    "clip": Entry("CLIP", TOWERS | {"projection_dim": 16}, "both", "vision_model", prefix=1),
    "siglip": Entry("Siglip", TOWERS, "both", "text_model"),
    "clip_text": Entry("CLIPText", TEXT | MARKS, causal=True),
    "siglip_text": Entry("SiglipText", TEXT | MARKS),
    "bert": Entry("Bert", pre_norm=False),
    "bert_decoder": Entry("Bert", TEXT | {"is_decoder": True}, pre_norm=False, causal=True),
    **{name: Entry(config, TEXT | {"pad_token_id": 0}, pre_norm=False) for name, config in ROBERTAS.items()},
    "roberta_prelayernorm": Entry("RobertaPreLayerNorm", TEXT | {"pad_token_id": 0}),
    "electra": Entry("Electra", TEXT | {"embedding_size": 32}, pre_norm=False),
    "ernie": Entry("Ernie", pre_norm=False),
    "esm": Entry("Esm", TEXT | {"pad_token_id": 0, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "distilbert": Entry("DistilBert", DISTILBERT, pre_norm=False),
    "modernbert": Entry("ModernBert", MODERNBERT),
    "t5_encoder": Entry("T5Encoder", T5),
    "t5_decoder": _two("T5", "decoder", T5),
    "bart_encoder": _two("Bart", "encoder", pre_norm=False),
    "bart_decoder": _two("Bart", "decoder", pre_norm=False),
    "mbart_encoder": _two("MBart", "encoder"),
    "mbart_decoder": _two("MBart", "decoder"),
    "pegasus": _two("Pegasus", "encoder"),
    "marian": _two("Marian", "decoder", pre_norm=False),
    "m2m_100": _two("M2M100", "decoder"),
    "whisper_encoder": _two("Whisper", "encoder", WHISPER, "sound"),
    "whisper_decoder": _two("Whisper", "decoder", WHISPER, "sound"),
    "gpt2": _causal("GPT2", GPT, kv_heads=4),
    "gpt_bigcode": _causal("GPTBigCode", GPT, kv_heads=1),
    "gpt_bigcode_many_keys": _causal("GPTBigCode", GPT | {"multi_query": False}, kv_heads=4),
    "gpt_neox": _causal("GPTNeoX", TEXT | MARKS, kv_heads=4),
    "biogpt": _causal("BioGpt", TEXT, kv_heads=4),
    "opt": _causal("OPT", OPT, kv_heads=4),
    "opt_350m": _causal("OPT", OPT | {"do_layer_norm_before": False}, kv_heads=4, pre_norm=False),
    **{name.lower(): _causal(name) for name in ("Llama", "Qwen2", "Phi3", "Olmo", "SmolLM3", "Starcoder2")},
    **{name.lower(): _causal(name) for name in ("Cohere", "StableLm", "Nemotron")},
    "mistral": _causal("Mistral", DECODER | {"sliding_window": 8}),
    "mixtral": _causal("Mixtral", DECODER | EXPERTS | {"num_local_experts": 2}),
    "qwen2_moe": _causal("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": _causal("Qwen3Moe", MOE | {"head_dim": 8}),
    **{name.lower(): _causal(name, DECODER | {"head_dim": 8}) for name in ("Qwen3", "Gemma", "Glm", "Glm4", "Helium")},
    "gemma2": _causal("Gemma2", DECODER | {"head_dim": 8, "sliding_window": 8}),
    "gemma3": _causal("Gemma3Text", DECODER | {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}),
    "olmo2": _causal("Olmo2", pre_norm=False),
    "granite": _causal("Granite", DECODER | {"residual_multiplier": 0.5}),
    "cohere2": _causal("Cohere2", DECODER | {"sliding_window": 8}),
    **{name.lower(): _causal(name, TEXT, kv_heads=4) for name in ("Phi", "Persimmon")},
}


def library() -> Any:
    """transformers, imported late: that takes seconds, too long while tests are collected."""
    return pytest.importorskip("transformers")


def tiny(name: str, **options: Any) -> nn.Module:
    """A model of any class of transformers."""
    model_class = getattr(library(), name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**options)).eval()


def build(name: str, head: str | None = None, **options: Any) -> nn.Module:
    """The model in float64, with weights so large that attention is far from uniform.

    `head` is the name of another class around the same layers, such as LlamaForCausalLM.
    """
    model = tiny(head or f"{ZOO[name].model}Model", **ZOO[name].options | options).double()
    for parameter in model.parameters():
        parameter.data += (0.1 if parameter.ndim == 1 else 0.25) * torch.randn_like(parameter)
    return model


def part_of(name: str, model: nn.Module) -> nn.Module:
    """The part with the entry's stack of layers."""
    part = ZOO[name].part
    return model if part is None else model.get_submodule(part)


def batch(name: str, seed: int = 1, padded: bool = True) -> dict[str, Tensor]:
    """Two samples; of text the second is padded on the right."""
    kind, generator = ZOO[name].kind, torch.Generator().manual_seed(seed)
    inputs = {}
    if kind in ("image", "both"):
        size = 32 if name in ("swin", "segformer") else 16
        inputs["pixel_values"] = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)
    if kind == "sound":
        inputs["input_features"] = torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    elif kind != "image":
        inputs["input_ids"] = torch.randint(3, 60, (2, 12), generator=generator)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if padded:
            inputs["attention_mask"][1, 9:] = 0
    if kind in ("seq2seq", "sound"):
        inputs["decoder_input_ids"] = torch.randint(3, 60, (2, 7), generator=generator)
    return inputs


@contextmanager
def in_float64() -> Iterator[None]:
    """The library's norms, rotary positions and softmax convert to float32, even in a float64 model; prevent that."""
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(Tensor, "float", Tensor.double):
        yield


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The last hidden state, or CLIP's scores of texts and images."""
    torch.manual_seed(0)  # MAE shuffles its patches
    found = model(**inputs)
    return found.logits_per_image if "logits_per_image" in found else found.last_hidden_state


def records(model, inputs, found):
    """The output of a forward pass, and the calls that every site recorded."""
    return recorded(lambda: output(model, inputs), found)


def table() -> str:
    """The zoo as a table for the documentation."""
    groups: dict[str, list[str]] = {}
    kinds = {"image": "images", "both": "images and texts, one stack at a time"}
    kinds |= dict.fromkeys(("seq2seq", "sound"), "encoder and decoder, one stack at a time")
    for entry in ZOO.values():
        group = kinds.get(entry.kind, "texts, causal" if entry.causal else "texts")
        names = groups.setdefault(group, [])
        names += [name] if (name := f"`{entry.model}`") not in names else []
    rows = [f"| {group} | {', '.join(sorted(names, key=str.lower))} |" for group, names in groups.items()]
    return "\n".join(["| For | Architectures |", "| --- | --- |", *rows])
