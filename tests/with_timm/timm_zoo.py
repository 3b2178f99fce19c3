"""timm's models from its own factory, at toy size."""

import timm
import torch
from timm.models import vision_transformer, vision_transformer_relpos

from sites.tiny_models import with_gradients

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
STAGES = {"num_classes": 5, "depths": (2, 2), "num_heads": (2, 4)}
SWIN = {**STAGES, "img_size": 32, "patch_size": 2, "embed_dim": 8, "window_size": 4}
PVT = {**STAGES, "embed_dims": (8, 16), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)}

# One model for each difference between timm's attention classes.
FLAT = {
    "vit_tiny_patch16_224": {},  # Attention
    "vit_base_patch16_clip_224": {},  # a norm before the first block
    "vit_base_patch14_reg4_dinov2": {},  # registers, LayerScale
    "vit_so150m_patch16_reg4_map_256": {},  # a pooling head that attends
    "vit_wee_patch16_reg1_gap_256": {},  # no class token, LayerScale, norm after pooling
    "vit_little_patch16_reg4_gap_256": {"qk_norm": True},
    "vit_tiny_patch16_224 scale norms": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "vit_tiny_patch16_224 norms after": {"block_fn": vision_transformer.ResPostBlock, "init_values": 0.5},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "beit_base_patch16_224": {},  # a relative position bias per layer, q and v biases, LayerScale
    "beitv2_base_patch16_224 shared": {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    "vit_relpos_small_patch16_224": {},  # position biases by an MLP
    "vit_srelpos_small_patch16_224": {},  # one for all layers
    "vit_relpos_small_patch16_224 norms after": {
        "block_fn": vision_transformer_relpos.ResPostRelPosBlock,
        "init_values": 0.5,
    },
    "eva02_tiny_patch14_224": {},  # EvaAttention: rotation, three projections
    "eva02_tiny_patch14_224 joint": {"qkv_fused": True, "scale_attn_inner": True},
    "eva02_tiny_patch14_224 norms after": {"use_post_norm": True},
    "eva_giant_patch14_224": {},  # joint projection, q and v biases
    "vit_small_patch16_dinov3": {},  # rotation by halves, registers
    "vit_small_patch16_rope_224 grouped": {"qkv_fused": False, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2},
    "naflexvit_base_patch16_gap": {"img_size": None, "attn_gated": True},
}
MIXED_HEADS = {"cait_xxs24_224": {}}
SHIFTED = {"swin_tiny_patch4_window7_224": SWIN}
MERGED = {"pvt_v2_b0": PVT, "pvt_v2_b2_li": PVT}
MEASURED = {**FLAT, **MIXED_HEADS, **SHIFTED, **MERGED}
FUSED = {"fused": True, "unfused": False}


def create(name, *, fused=True, **options):
    sizes = {} if name in SHIFTED | MERGED else {**SMALL, "num_heads": 4} if name in MIXED_HEADS else SMALL
    options = {**sizes, **MEASURED[name], **options}
    torch.manual_seed(0)
    return prepared(timm.create_model(name.split()[0], **options), fused)


def prepared(model, fused):
    """The model in float64, without parameters that could hide a mistake, such as zero biases."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def images(seed=2, count=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=generator)


def assert_parity(model, expected, run=None, tolerance=1e-10, **arguments):
    """The model's output and gradients are the expected ones, also if `run` replaces the model."""
    found = with_gradients((model if run is None else run)(images(), **arguments), model.named_parameters())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
