"""timm's NaFlexVit, which takes images of any size in one batch: padding changes nothing, or is refused."""

import pytest
import torch
from timm_zoo import SMALL, prepared
from torch import nn

import acutance as ac
from acutance.errors import ShapeError
from sites.tiny_models import readings

naflexvit = pytest.importorskip("timm.models.naflexvit", reason="this timm has no NaFlexVit")
GRIDS = [(4, 3), (2, 3)]  # patches down and across
METRICS = ["token_cosine", "hfc_lfc_frobenius", "attention_entropy", "nonlocal_energy", "gradient_alignment"]
VARIANTS = {
    "positions": {},
    "rotation": {"rope_type": "axial"},
    "registers": {"reg_tokens": 2},
    "keys masked": {"use_key_only_attn_mask": True},
    "step by step": {},
}


def build(variant):
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if key not in ("img_size", "num_classes")}
    model = naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(**sizes, **VARIANTS[variant]), num_classes=5)
    return prepared(model, fused=variant != "step by step")


def batch(grids):
    """Patches of images of these sizes, each with its own numbers, padded to one length."""
    length = max(down * across for down, across in grids)
    patches = torch.randn(len(grids), length, 8 * 8 * 3, dtype=torch.float64)  # padding is not zero, so that it shows
    coordinates, valid = torch.zeros(len(grids), length, 2, dtype=torch.long), torch.zeros(len(grids), length)
    for i, (down, across) in enumerate(grids):
        count, generator = down * across, torch.Generator().manual_seed(down)
        patches[i, :count] = torch.randn(count, 8 * 8 * 3, dtype=torch.float64, generator=generator)
        coordinates[i, :count] = torch.cartesian_prod(torch.arange(down), torch.arange(across))
        valid[i, :count] = 1
    return {"x": patches, "patch_coord": coordinates, "patch_valid": valid.bool()}


def measured(model, *batches):
    return readings(ac.measure(model, batches, metrics=METRICS, tap=["block", "attention", "values"], progress=False))


@pytest.mark.parametrize("form", [dict, lambda one: {"x": {"patches": one.pop("x"), **one}}])  # as timm's loader has it
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "registers"])
def test_padding_changes_no_reading(variant, form):
    model = build(variant)
    together, apart = measured(model, form(batch(GRIDS))), [measured(model, form(batch([grid]))) for grid in GRIDS]
    assert together == pytest.approx({key: (apart[0][key] + apart[1][key]) / 2 for key in together}, rel=1e-9)
    assert {layer for _, layer, _ in together} == {0, 1, 2, 3}


def test_padding_behind_registers_is_refused():
    model = build("registers")
    with pytest.raises(ShapeError, match=r"mask is \(2, 12\), but the tokens are \(2, 14\).* one size"):
        measured(model, batch(GRIDS))
    assert measured(model, *(batch([grid]) for grid in GRIDS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mitigation_does_not_see_the_padding(variant):
    model = build(variant)
    plain = model(**batch(GRIDS))
    with ac.mitigate(model, "neutreno:0.6+attnscale"):
        nn.init.normal_(next(model.blocks[1].attn.mitigation.parameters()))
        together = model(**batch(GRIDS))
        apart = torch.cat([model(**batch([grid])) for grid in GRIDS])
        torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(together, plain)
    torch.testing.assert_close(model(**batch(GRIDS)), plain, rtol=1e-9, atol=1e-9)  # with other numbers as padding
