"""Small readable reference models."""

from acutance.models.block import Attention, Block, BlockConfig
from acutance.models.checkpoint import from_checkpoint, load_checkpoint, save_checkpoint
from acutance.models.config import LanguageConfig, SegmenterConfig, ViTConfig
from acutance.models.language import LanguageModel
from acutance.models.position import resize_position_embedding
from acutance.models.presets import (
    deit_base,
    deit_small,
    deit_tiny,
    vit_digits,
    vit_tiny_cifar,
    vit_tiny_minus,
    vit_tiny_plus,
)
from acutance.models.segmenter import Encoder, MaskTransformer, Segmenter
from acutance.models.stack import BlockStack
from acutance.models.vit import ViT

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
    "from_checkpoint",
    "load_checkpoint",
    "resize_position_embedding",
    "save_checkpoint",
    "vit_digits",
    "vit_tiny_cifar",
    "vit_tiny_minus",
    "vit_tiny_plus",
]
