"""Small readable reference models: ViT, Segmenter, language model.

They carry v⁰ in plain sight and their state-dict keys are timm's. They know mitigations by their hooks alone, and
nothing of measuring.
"""

from acutance.models.block import Attention, Block, BlockConfig
from acutance.models.language import LanguageConfig, LanguageModel
from acutance.models.segmenter import Encoder, MaskTransformer, Segmenter, SegmenterConfig
from acutance.models.vit import (
    BlockStack,
    ViT,
    ViTConfig,
    deit_base,
    deit_small,
    deit_tiny,
    resize_position_embedding,
    vit_digits,
    vit_tiny_cifar,
    vit_tiny_minus,
    vit_tiny_plus,
)

__all__ = [
    "Attention",
    "Block",
    "BlockConfig",
    "BlockStack",
    "Encoder",
    "LanguageConfig",
    "LanguageModel",
    "MaskTransformer",
    "Segmenter",
    "SegmenterConfig",
    "ViT",
    "ViTConfig",
    "deit_base",
    "deit_small",
    "deit_tiny",
    "resize_position_embedding",
    "vit_digits",
    "vit_tiny_cifar",
    "vit_tiny_minus",
    "vit_tiny_plus",
]
