"""Mitigations in timm's models against plain formulas: outputs and the gradients of all parameters."""

from functools import partial

import pytest
import torch
from plain_timm import write_formulas
from timm_zoo import FLAT, FUSED, MERGED, MIXED_HEADS, SHIFTED, assert_parity, create, images
from torch.func import functional_call

import acutance as ac
from acutance.errors import AcutanceError, ShapeError
from mitigations.steered import assert_it_goes_stays_and_comes_back
from parity.parity_formula import learnt, of_part, with_plain_weights
from sites.tiny_models import leaves_of, left_alone, mitigated, with_gradients

WITHOUT_OPERATOR = "neutreno:0.6+featscale"  # all that heads which are mixed leave
FOUR = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224"]


def check_parity(make, spec, run=lambda model: model, **arguments):
    """The model mitigated in place, and another one with the plain formulas."""
    model, plain = make(), make()
    mitigated(model, spec)
    leaves, names = leaves_of(model), {module: name for name, module in plain.named_modules()}
    attentions = [site.attention for site in ac.sites.find(plain)]
    own = [of_part(learnt(leaves, names[attention]), [""], 0) for attention in attentions]
    write_formulas(attentions, own, strength=0.6 * ("neutreno" in spec))
    weights = {path: p for path, p in leaves.items() if ".mitigation." not in path}
    expected = with_gradients(functional_call(plain, weights, (images(),), arguments), leaves)
    assert_parity(model, expected, run(model), **arguments)


@pytest.fixture(params=FUSED.values(), ids=FUSED)
def fused(request):
    return request.param


@pytest.mark.parametrize("name", FLAT)
def test_all_hooks_in_models_of_one_token_count(name, fused):
    check_parity(partial(create, name, fused=fused), "neutreno:0.6+attnscale+featscale")


@pytest.mark.parametrize("name", MIXED_HEADS)
def test_talking_heads_have_values_but_no_operator(name):
    check_parity(partial(create, name), WITHOUT_OPERATOR)
    other = create(name)
    ac.mitigate(other, "attnscale")
    with pytest.raises(AcutanceError, match="mixes its heads"):
        other(images())


@pytest.mark.parametrize("name", SHIFTED | MERGED)
def test_where_tokens_move_or_merge_what_needs_them_in_place_is_refused(name, fused):
    model, match = create(name, fused=fused), r" cannot be used in .*attn: .*(windows are shifted|merges)"
    with left_alone(model, lambda: model(images())):
        with pytest.raises(AcutanceError, match=f"neutreno:0.6{match}"):
            ac.mitigate(model, "neutreno:0.6")
        if name in SHIFTED:
            with pytest.raises(AcutanceError, match=r"featscale cannot be used in .*one window at a time"):
                ac.mitigate(model, "featscale")
    check_parity(partial(create, name, fused=fused), "attnscale" if name in SHIFTED else "featscale")


BIAS = torch.randn(17, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
MASKS = {
    "bool": {"attn_mask": (BIAS < 0) | torch.eye(17, dtype=torch.bool)},
    "bias": {"attn_mask": BIAS},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_masks(name, kind, fused):
    check_parity(partial(create, name, fused=fused), "neutreno:0.6", **MASKS[kind])


@pytest.mark.parametrize("name", FOUR)
def test_dropout_draws_the_same_numbers(name, fused):
    rates = {"attn_drop_rate": 0.3, "proj_drop_rate": 0.3, "drop_path_rate": 0.3, "pos_drop_rate": 0.1}
    model = create(name, fused=fused, **rates).train()

    def run(*given):
        torch.manual_seed(6)
        return model(*given)

    expected = with_gradients(run(images()), model.named_parameters())
    state = torch.get_rng_state()
    ac.mitigate(model, "neutreno:0")
    assert_parity(model, expected, run, tolerance=0.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("name", "fused"), [(FOUR[1], True), (FOUR[3], True), (FOUR[0], False)])
def test_compiled_whole(name, fused):  # the others are in the parity matrix
    torch._dynamo.reset()
    spec = "neutreno:0.6" if name in MIXED_HEADS else "neutreno:0.6+attnscale"
    check_parity(partial(create, name, fused=fused), spec, partial(torch.compile, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize("name", FOUR)
def test_timms_own_checkpointing_with_two_forward_passes_under_way(name):
    model = create(name)
    mitigated(model, WITHOUT_OPERATOR)

    def both():
        return with_gradients(torch.cat([model(images(seed)) for seed in (2, 7)]), model.named_parameters())

    expected = both()
    model.set_grad_checkpointing()
    torch.testing.assert_close(both(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FOUR)
def test_removal_leaves_nothing_behind(name):
    model = create(name)
    keys = list(model.state_dict())
    with left_alone(model, lambda: model(images())) as before, ac.mitigate(model, "neutreno:0.4"):
        assert list(model.state_dict()) == keys
        assert not torch.equal(model(images()), before)


# Eigen: H = V Λ Vᵀ written out

# BEiT reads the weight itself, and keeps the values' bias beside it.
NAMES = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3"]


def steered(name, basis="polar"):
    """The model, and its output and gradients with W_V = Vᵀ and W_proj = V Λ put where timm has them."""
    model, plain = create(name), create(name)
    mitigated(model, f"eigen:negative,basis={basis}")
    leaves = leaves_of(model)
    state = with_plain_weights(leaves, "attn.qkv.weight", "attn.proj.weight", basis)
    output = functional_call(plain, {path: x for path, x in state.items() if "mitigation" not in path}, (images(),))
    return model, with_gradients(output, leaves)


@pytest.mark.parametrize("basis", ["polar", "cayley"])
@pytest.mark.parametrize("name", NAMES)
def test_function_and_gradients_are_those_of_the_formula(name, basis):
    model, expected = steered(name, basis)
    assert_parity(model, expected, tolerance=1e-9)


def test_however_it_runs():
    model, expected = steered("beit_base_patch16_224")
    torch.compiler.reset()
    assert_parity(model, expected, torch.compile(model, backend="aot_eager", fullgraph=True), tolerance=1e-9)
    model.train().set_grad_checkpointing()
    assert_parity(model, expected, tolerance=1e-9)


@pytest.mark.parametrize("name", [*NAMES, "swin_tiny_patch4_window7_224", "pvt_v2_b0"])
def test_it_goes_stays_and_comes_back(tmp_path, name):
    file = tmp_path / "model.safetensors"
    assert_it_goes_stays_and_comes_back(lambda: create(name), lambda model: model(images()), file)


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("cait_xxs24_224", AcutanceError, "mixing of heads stands between"),
        ("vit_tiny_patch16_224 scale norms", AcutanceError, "a gate of Attention before W_proj stands between"),
        ("naflexvit_base_patch16_gap", AcutanceError, "a gate of EvaAttention before W_proj stands between"),
        ("vit_small_patch16_rope_224 grouped", ShapeError, "a value head for every query head"),
    ],
)
def test_what_is_refused_is_left_as_it_was(name, error, reason):
    model = create(name)
    with left_alone(model), pytest.raises(error, match=reason):
        ac.mitigate(model, "eigen:negative")
