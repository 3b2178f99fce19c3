"""Mitigations in timm's models against plain formulas: outputs and the gradients of all parameters."""

import copy

import pytest
import torch
from plain_timm import plain_formulas
from timm_zoo import FLAT, FUSED, MERGED, MIXED_HEADS, SHIFTED, assert_same, create, gradients, images

import acutance as ac
from acutance.errors import AcutanceError

ALL_THREE = "neutreno:0.6+attnscale+featscale"
WITHOUT_OPERATOR = "neutreno:0.6+featscale"  # all that heads which are mixed leave
FOUR = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224"]


def mitigated(model, spec):
    """The learnt parameters away from the identity."""
    handle = ac.mitigate(model, spec)
    for name, parameter in model.named_parameters():
        if ".mitigation." in name:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=parameter.dtype)
            parameter.data += 0.3 * noise
    return handle


def loss_of(output):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=output.dtype)
    return (output * weights).sum()


def attentions_of(model):
    return [site.attention for site in ac.sites.find(model)]


def plain(model, spec, **arguments):
    """Output and gradients by the plain formulas, in a copy without the mitigation, named as in the mitigated model."""
    twin = copy.deepcopy(model)
    learnt = {
        name: p.detach().clone().requires_grad_() for name, p in twin.named_parameters() if ".mitigation." in name
    }
    names = [name for name, module in twin.named_modules() if module in attentions_of(twin)]
    attentions = [twin.get_submodule(name) for name in names]
    undivert(twin)

    def per_layer(kind):
        return [p for n, p in learnt.items() if n.endswith(f".{kind}")] or None

    strength = 0.6 if "neutreno" in spec else None
    with plain_formulas(attentions, strength, per_layer("gain"), per_layer("low"), per_layer("high")):
        output = twin(images(), **arguments)
    found = gradients(twin, loss_of(output))
    return output.detach(), found | {name: p.grad for name, p in learnt.items()}


def undivert(model):
    """Back to timm's own forward, whatever it takes: this side of the comparison must not depend on our undoing."""
    for module in model.modules():
        vars(module).pop("forward", None)
        module._modules.pop("mitigation", None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def check_parity(model, spec, tolerance=1e-10, run=None, **arguments):
    wanted, wanted_gradients = plain(model, spec, **arguments)
    output = (model if run is None else run)(images(), **arguments)
    torch.testing.assert_close(output.detach(), wanted, rtol=tolerance, atol=tolerance)
    assert_same(gradients(model, loss_of(output)), wanted_gradients, tolerance)


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("name", FLAT)
def test_all_hooks_in_models_of_one_token_count(name, fused):
    model = create(name, fused=fused)
    mitigated(model, ALL_THREE)
    check_parity(model, ALL_THREE)


@pytest.mark.parametrize("name", MIXED_HEADS)
def test_talking_heads_have_values_but_no_operator(name):
    model = create(name)
    mitigated(model, WITHOUT_OPERATOR)
    check_parity(model, WITHOUT_OPERATOR)
    other = create(name)
    ac.mitigate(other, "attnscale")
    with pytest.raises(AcutanceError, match="mixes its heads"):
        other(images())


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
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
    spec = "attnscale" if name in SHIFTED else "featscale"
    mitigated(model, spec)
    check_parity(model, spec)


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("kind", ["bool", "bias", "causal"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_masks(name, kind, fused):
    model = create(name, fused=fused)
    tokens = 17
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand(tokens, tokens, generator=generator) < 0.5
    masks = {
        "bool": {"attn_mask": seen | torch.eye(tokens, dtype=torch.bool)},
        "bias": {"attn_mask": torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)},
        "causal": {"is_causal": True},
    }
    mitigated(model, "neutreno:0.6")
    check_parity(model, "neutreno:0.6", **masks[kind])


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("name", FOUR)
def test_dropout_draws_the_same_numbers(name, fused):
    rates = {"attn_drop_rate": 0.3, "proj_drop_rate": 0.3, "drop_path_rate": 0.3, "pos_drop_rate": 0.1}
    model = create(name, fused=fused, **rates).train()
    outputs = []
    for spec in (None, "neutreno:0"):
        if spec is not None:
            ac.mitigate(model, spec)
        torch.manual_seed(6)
        output = model(images())
        outputs.append((output, gradients(model, loss_of(output)), torch.get_rng_state()))
    (ours, our_gradients, our_state), (theirs, their_gradients, their_state) = outputs
    assert torch.equal(ours, theirs)
    assert torch.equal(our_state, their_state)
    assert_same(our_gradients, their_gradients, 0.0)


@pytest.mark.parametrize(("name", "fused"), [(FOUR[1], True), (FOUR[3], True), (FOUR[0], False)])
def test_compiled_whole(name, fused):  # the others are in the parity matrix
    torch._dynamo.reset()
    model = create(name, fused=fused)
    spec = "neutreno:0.6" if name in MIXED_HEADS else "neutreno:0.6+attnscale"
    mitigated(model, spec)
    check_parity(model, spec, run=torch.compile(model, fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize("name", FOUR)
def test_timms_own_checkpointing_with_two_forward_passes_under_way(name):
    model = create(name)
    mitigated(model, WITHOUT_OPERATOR)
    first, second = (gradients(model, loss_of(model(images(seed)))) for seed in (2, 7))
    both = {path: gradient + second[path] for path, gradient in first.items()}
    model.set_grad_checkpointing()
    losses = [loss_of(model(images(seed))) for seed in (2, 7)]
    assert_same(gradients(model, losses[0] + losses[1]), both)


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
