"""timm's attention with an adapter such as LoRA's around a projection: read as what it does."""

import numpy as np
import pytest
import torch
from timm_zoo import create, images
from torch import nn

import acutance as ac
from acutance.errors import NoSitesError
from acutance.lab.studies import kernel_assumptions


class Adapter(nn.Module):
    """W + BA, which shows the weight of the layer inside as peft's layers do."""

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        rows, columns = base.weight.shape
        self.down, self.up = nn.Linear(columns, 2, bias=False).double(), nn.Linear(2, rows, bias=False).double()

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224 grouped"])
def test_adapters_count(name):
    model, merged = create(name), create(name)
    for ours, theirs in zip(model.blocks, merged.blocks, strict=True):
        for part in [
            part for part in ("qkv", "v_proj", "proj") if isinstance(getattr(ours.attn, part, None), nn.Linear)
        ]:
            adapter = Adapter(getattr(ours.attn, part))
            setattr(ours.attn, part, adapter)
            getattr(theirs.attn, part).weight.data += adapter.up.weight.detach() @ adapter.down.weight.detach()
    spectra = [ac.explain(one, [images()], progress=False) for one in (model, merged, create(name))]
    heads = [np.sort(np.abs(spectrum.layers[1].heads)) for spectrum in spectra]
    np.testing.assert_allclose(heads[0], heads[1], atol=1e-9)
    assert not np.allclose(heads[0], heads[2])
    ours, theirs = (kernel_assumptions(one, [images()]).weights_asymmetry for one in (model, merged))
    np.testing.assert_allclose(ours, theirs, atol=1e-9)
    ours, theirs = (ac.measure(one, [images()], tap="attention", progress=False).readings for one in (model, merged))
    assert [r.mean for r in ours] == pytest.approx([r.mean for r in theirs])


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_an_adapter_that_timm_passes_by_is_refused(name):
    model = create(name)
    before = model(images())
    model.blocks[0].attn.qkv = Adapter(model.blocks[0].attn.qkv)
    assert torch.equal(model(images()), before), "timm does not use it"
    with pytest.raises(
        NoSitesError, match=r"blocks\.0\.attn multiplies by the weight of its qkv itself.*Adapter.*merge"
    ):
        ac.explain(model)
