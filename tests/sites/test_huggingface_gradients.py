"""Mitigated models against the plain formulas, architecture by architecture: outputs, gradients of all parameters."""

import copy

import pytest
import torch
from hf_zoo import ZOO, batch, build, in_float64, output, part_of

import acutance as ac
from acutance import sites
from parity.parity_formula import use_formula

pytestmark = pytest.mark.usefixtures("transformers")
WITH_FIRST_VALUES = [name for name, entry in ZOO.items() if entry.first_values]
WITHOUT_MEAN = ["swin", "modernbert"]  # and causal ones: where a mean over tokens is refused
ALONE = [
    (name, implementation, spec)
    for name in ("vit", "beit", "bert", "t5_encoder", "bart_decoder", "gpt2", "llama", "gemma2")
    for implementation in ("sdpa", "eager")
    for spec in ("neutreno:0.6,learn=layer", "neutreno:0.6,learn=head", "attnscale", "featscale")
    if not (name == "gemma2" and implementation == "sdpa")  # which the library refuses itself
    and not (spec == "featscale" and ZOO[name].causal)
]


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def shake(model):
    """Learnt parameters away from where they start."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".mitigation." in path:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def loss(model, inputs):
    """All tokens that are not padding count, each differently."""
    with in_float64():
        y = output(model, inputs)
        mask = inputs.get("attention_mask")
        if mask is not None and y.shape[:2] == mask.shape:
            y = y * mask[..., None]
        return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).sum()


def gradients(model, inputs):
    value = loss(model, inputs)
    value.backward()
    return value.detach(), {path: p.grad for path, p in model.named_parameters()}


def assert_parity(name, spec, inputs, implementation=None):
    """The model mitigated in place, and the same model with the plain formulas."""
    model = build(name)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        unmitigated = loss(model, inputs)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    found, theirs = sites.find(part_of(name, model)), sites.find(part_of(name, plain))
    ac.mitigate(part_of(name, model), spec)
    shake(model)
    own = [
        {path.rpartition(".")[2]: p.detach().clone().requires_grad_() for path, p in site.mitigation.named_parameters()}
        for site in found
    ]
    layers = [(site.attention, site.output_projection()) for site in theirs]
    use_formula(plain, layers, own, strength=0.6 if "neutreno" in spec else 0.0)
    value, grads = gradients(model, inputs)
    expected, expected_grads = gradients(plain, inputs)
    assert abs(expected - unmitigated) > 1e-3  # the mitigation does something
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    for path, gradient in expected_grads.items():
        assert_gradients(path, grads.pop(path), gradient)
    assert all(".mitigation." in path for path in grads)
    ours = [p for site in found for p in site.mitigation.parameters()]
    for parameter, counterpart in zip(ours, [p for learnt in own for p in learnt.values()], strict=True):
        assert_gradients("mitigation", parameter.grad, counterpart.grad)
    assert len(grads) == len(ours)


def assert_gradients(path, gradient, expected):
    gradient = torch.zeros(()) if gradient is None else gradient
    expected = torch.zeros(()) if expected is None else expected
    scale = max(1.0, expected.abs().max().item())
    assert (gradient - expected).abs().max() <= 1e-10 * scale, path


@pytest.mark.parametrize("name", WITH_FIRST_VALUES)
def test_neutreno(name):
    assert_parity(name, "neutreno:0.6", batch(name))


@pytest.mark.parametrize("name", ZOO)
def test_a_chain_of_learnt_mitigations(name):
    parts = ["attnscale"]  # first: it scales A, whatever is added afterwards
    parts += ["neutreno:0.6,learn=head"] if ZOO[name].first_values else []
    parts += ["featscale"] if not ZOO[name].causal and name not in WITHOUT_MEAN else []
    assert_parity(name, "+".join(parts), batch(name, padded="featscale" not in parts))


@pytest.mark.parametrize(("name", "implementation", "spec"), ALONE)
def test_one_mitigation_in_either_implementation(name, implementation, spec):
    assert_parity(name, spec, batch(name, padded=spec != "featscale"), implementation)
