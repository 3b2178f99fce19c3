"""Small readable reference models: ViT, Segmenter, language model.

They carry v⁰ in plain sight and their state-dict keys are timm's. They know mitigations by their hooks alone, and
nothing of measuring.
"""

from acutance.models.block import Attention as Attention
from acutance.models.block import Block as Block
from acutance.models.language import LanguageConfig as LanguageConfig
from acutance.models.language import LanguageModel as LanguageModel
from acutance.models.segmenter import MaskTransformer as MaskTransformer
from acutance.models.segmenter import Segmenter as Segmenter
from acutance.models.segmenter import SegmenterConfig as SegmenterConfig
from acutance.models.vit import BlockStack as BlockStack
from acutance.models.vit import Encoder as Encoder
from acutance.models.vit import ViT as ViT
from acutance.models.vit import ViTConfig as ViTConfig
from acutance.models.vit import deit_base as deit_base
from acutance.models.vit import deit_small as deit_small
from acutance.models.vit import deit_tiny as deit_tiny
from acutance.models.vit import resize_position_embedding as resize_position_embedding
from acutance.models.vit import vit_digits as vit_digits
from acutance.models.vit import vit_tiny_cifar as vit_tiny_cifar
from acutance.models.vit import vit_tiny_minus as vit_tiny_minus
from acutance.models.vit import vit_tiny_plus as vit_tiny_plus
