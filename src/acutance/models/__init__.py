"""Small readable reference models."""

from acutance.models.checkpoint import from_checkpoint, load_checkpoint, save_checkpoint
from acutance.models.config import ViTConfig
from acutance.models.position import resize_position_embedding
from acutance.models.presets import deit_base, deit_small, deit_tiny, vit_tiny_cifar, vit_tiny_minus, vit_tiny_plus
from acutance.models.vit import Attention, Block, ViT

__all__ = [
    "Attention",
    "Block",
    "ViT",
    "ViTConfig",
    "deit_base",
    "deit_small",
    "deit_tiny",
    "from_checkpoint",
    "load_checkpoint",
    "resize_position_embedding",
    "save_checkpoint",
    "vit_tiny_cifar",
    "vit_tiny_minus",
    "vit_tiny_plus",
]
