import pytest
import timm
import torch

from acutance.io.saving import load_checkpoint
from acutance.models import ViT, deit_tiny, resize_position_embedding
from sites.tiny_models import with_gradients

THEIRS = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 10}
OURS = {"image_size": 32, "patch_size": 4, "dim": 48, "depth": 4, "heads": 3, "num_classes": 10}


def small(ours, name="vit_tiny_patch16_224", **theirs):
    return timm.create_model(name, **THEIRS, **theirs), ViT(**OURS, **ours)


DISTILLED = "deit_tiny_distilled_patch16_224"
PAIRS = {
    "plain": lambda: small({}),
    "registers": lambda: small({"registers": 3}, reg_tokens=3),
    "layer scale": lambda: small({"layer_scale": 0.1}, init_values=0.1),
    "no class token": lambda: small({"class_token": False}, class_token=False, global_pool="avg", fc_norm=False),
    "registers only": lambda: small(
        {"class_token": False, "registers": 3}, class_token=False, reg_tokens=3, global_pool="avg", fc_norm=False
    ),
    "distilled": lambda: small({"distilled": True}, DISTILLED),
    "deit_tiny": lambda: (timm.create_model("deit_tiny_patch16_224"), deit_tiny()),
    "deit_tiny distilled": lambda: (timm.create_model(DISTILLED), deit_tiny(distilled=True)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_weights_load_and_give_the_same_outputs_and_gradients(name):
    torch.manual_seed(0)
    theirs, ours = (model.double().eval() for model in PAIRS[name]())
    for parameter in theirs.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    load_checkpoint(ours, theirs.state_dict())
    size = ours.config.image_size
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images))
    found, expected = (with_gradients(model(images), model.named_parameters()) for model in (ours, theirs))
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-7, atol=1e-7)


def test_position_embeddings_are_resized_alike():
    pos = torch.randn(1, 197, 48)
    expected = timm.layers.resample_abs_pos_embed(pos, (20, 12), num_prefix_tokens=1)
    torch.testing.assert_close(resize_position_embedding(pos, (20, 12), 1), expected)
