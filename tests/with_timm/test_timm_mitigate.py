"""Mitigations in timm's models against plain formulas: outputs and the gradients of all parameters."""

import copy

import pytest
import timm_zoo
import torch
from plain_timm import plain_formulas
from timm_zoo import FLAT, FUSED, MERGED, MIXED_HEADS, SHIFTED, assert_parity, create, gradients, images, loss_of

import acutance as ac
from acutance.errors import AcutanceError

ALL_THREE = "neutreno:0.6+attnscale+featscale"
WITHOUT_OPERATOR = "neutreno:0.6+featscale"  # all that heads which are mixed leave
FOUR = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224"]


def plain(model, spec, **arguments):
    """Output and gradients by the plain formulas, in a copy without the mitigation, named as in the mitigated model."""
    twin = copy.deepcopy(model)
    learnt = {
        name: p.detach().clone().requires_grad_() for name, p in twin.named_parameters() if ".mitigation." in name
    }
    attentions = [site.attention for site in ac.sites.find(twin)]
    # Back to timm's own forward, whatever it takes: this side of the comparison must not depend on our undoing.
    for module in twin.modules():
        vars(module).pop("forward", None)
        module._modules.pop("mitigation", None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()

    def per_layer(kind):
        return [p for n, p in learnt.items() if n.endswith(f".{kind}")] or None

    strength = 0.6 if "neutreno" in spec else None
    with plain_formulas(attentions, strength, per_layer("gain"), per_layer("low"), per_layer("high")):
        output = twin(images(), **arguments)
    found = gradients(twin, loss_of(output))
    return output.detach(), found | {name: p.grad for name, p in learnt.items()}


def check_parity(model, spec, run=None, **arguments):
    timm_zoo.mitigated(model, spec)
    assert_parity(model, plain(model, spec, **arguments), run, **arguments)


@pytest.fixture(params=FUSED.values(), ids=FUSED)
def fused(request):
    return request.param


@pytest.mark.parametrize("name", FLAT)
def test_all_hooks_in_models_of_one_token_count(name, fused):
    check_parity(create(name, fused=fused), ALL_THREE)


@pytest.mark.parametrize("name", MIXED_HEADS)
def test_talking_heads_have_values_but_no_operator(name):
    check_parity(create(name), WITHOUT_OPERATOR)
    other = create(name)
    ac.mitigate(other, "attnscale")
    with pytest.raises(AcutanceError, match="mixes its heads"):
        other(images())


@pytest.mark.parametrize("name", SHIFTED | MERGED)
def test_where_tokens_move_or_merge_what_needs_them_in_place_is_refused(name, fused):
    model = create(name, fused=fused)
    with pytest.raises(AcutanceError, match=r"neutreno:0.6 cannot be used in .*attn: .*(windows are shifted|merges)"):
        ac.mitigate(model, "neutreno:0.6")
    untouched = create(name, fused=fused)
    assert torch.equal(model(images()), untouched(images()))
    if name in SHIFTED:
        with pytest.raises(AcutanceError, match=r"featscale cannot be used in .*one window at a time"):
            ac.mitigate(model, "featscale")
    check_parity(model, "attnscale" if name in SHIFTED else "featscale")


BIAS = torch.randn(17, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
MASKS = {
    "bool": {"attn_mask": (BIAS < 0) | torch.eye(17, dtype=torch.bool)},
    "bias": {"attn_mask": BIAS},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_masks(name, kind, fused):
    check_parity(create(name, fused=fused), "neutreno:0.6", **MASKS[kind])


@pytest.mark.parametrize("name", FOUR)
def test_dropout_draws_the_same_numbers(name, fused):
    rates = {"attn_drop_rate": 0.3, "proj_drop_rate": 0.3, "drop_path_rate": 0.3, "pos_drop_rate": 0.1}
    model = create(name, fused=fused, **rates).train()

    def run(*given):
        torch.manual_seed(6)
        return model(*given)

    output = run(images())
    expected, state = (output.detach(), gradients(model, loss_of(output))), torch.get_rng_state()
    ac.mitigate(model, "neutreno:0")
    assert_parity(model, expected, run, tolerance=0.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("name", "fused"), [(FOUR[1], True), (FOUR[3], True), (FOUR[0], False)])
def test_compiled_whole(name, fused):  # the others are in the parity matrix
    torch._dynamo.reset()
    model = create(name, fused=fused)
    spec = "neutreno:0.6" if name in MIXED_HEADS else "neutreno:0.6+attnscale"
    check_parity(model, spec, run=torch.compile(model, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize("name", FOUR)
def test_timms_own_checkpointing_with_two_forward_passes_under_way(name):
    model = create(name)
    timm_zoo.mitigated(model, WITHOUT_OPERATOR)
    first, second = (gradients(model, loss_of(model(images(seed)))) for seed in (2, 7))
    both = {path: gradient + second[path] for path, gradient in first.items()}
    model.set_grad_checkpointing()
    losses = [loss_of(model(images(seed))) for seed in (2, 7)]
    timm_zoo.assert_same(gradients(model, losses[0] + losses[1]), both)


@pytest.mark.parametrize("name", FOUR)
def test_removal_leaves_nothing_behind(name):
    model = create(name)
    before, keys = model(images()), list(model.state_dict())
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    with ac.mitigate(model, "neutreno:0.4"):
        assert list(model.state_dict()) == keys
        assert not torch.equal(model(images()), before)
    assert torch.equal(model(images()), before)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
