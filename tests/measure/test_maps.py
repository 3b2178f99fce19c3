import numpy as np
import pytest
import torch
from embedding import embedded

import acutance as ac
from acutance.errors import AcutanceError
from acutance.models import ViT


@pytest.fixture
def model() -> ViT:
    torch.manual_seed(0)
    return ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=12, heads=3, num_classes=4).double()


def test_maps_are_the_softmax_matrices(model: ViT) -> None:
    sample = torch.randn(1, 8, 8, dtype=torch.float64)
    maps = ac.attention_maps(model, sample, layers=[1, 6, 12])
    assert list(maps) == [1, 6, 12]
    with torch.no_grad():
        block = model.blocks[0]
        q, k, _ = block.attn.qkv(block.norm1(embedded(model, sample[None])))[0].view(17, 3, 3, 8).permute(1, 2, 0, 3)
        want = (q @ k.mT / 8**0.5).softmax(-1)
    np.testing.assert_allclose(maps[1], want, atol=1e-6)
    np.testing.assert_allclose(maps[12].sum(-1), 1, atol=1e-6)
    assert len(maps.plot().axes) == 9
    assert repr(maps) == "AttentionMaps({1: (3, 17, 17), 6: (3, 17, 17), 12: (3, 17, 17)})"


def test_maps_are_those_of_evaluation_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=2, heads=3, num_classes=4, dropout=0.5)
    sample = torch.randn(1, 8, 8)
    expected = ac.attention_maps(model.eval(), sample, layers=[2])
    np.testing.assert_array_equal(ac.attention_maps(model.train(), sample, layers=[2])[2], expected[2])
    assert model.training


def test_errors(model: ViT) -> None:
    with pytest.raises(AcutanceError, match="no layer 13: this model has layers 1 to 12"):
        ac.attention_maps(model, torch.randn(1, 8, 8).double(), layers=[13])
    with pytest.raises(AcutanceError, match="name at least one layer, from 1 to 12"):
        ac.attention_maps(model, torch.randn(1, 8, 8).double(), layers=[])
    with pytest.raises(AcutanceError, match="a batch of 2"):
        ac.attention_maps(model, torch.randn(2, 1, 8, 8).double(), layers=[1])
    assert all(block.attn.observer is None for block in model.blocks)
