"""Every architecture of transformers that is known: outputs and gradients of the plain formulas."""

import copy

import pytest
import torch
from parity_formula import use_formula

from acutance import sites
from sites.hf_zoo import ZOO, batch, build, in_float64, output, part_of
from sites.tiny_models import mitigated

EITHER = ("vit", "beit", "bert", "t5_encoder", "bart_decoder", "gpt2", "llama")  # tried by both implementations
WITHOUT_MEAN = ("swin", "modernbert")  # and causal ones: where a mean over tokens is refused


def with_gradients(model, inputs):
    """All tokens that are not padding count, each differently."""
    with in_float64():
        y = output(model, inputs)
        mask = inputs.get("attention_mask")
        if mask is not None and y.shape[:2] == mask.shape:
            y = y * mask[..., None]
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)).sum().backward()
    found = {path: torch.zeros_like(p) if p.grad is None else p.grad for path, p in model.named_parameters()}
    return found | {"output": y.detach()}


def assert_parity(name, spec, inputs, implementation=None):
    """The model mitigated in place, and the same model with the plain formulas."""
    model = build(name)
    plain = copy.deepcopy(model)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    found, theirs = sites.find(part_of(name, model)), sites.find(part_of(name, plain))
    layers = [(site.attention, site.output_projection()) for site in theirs]
    mitigated(part_of(name, model), spec)
    for site, (attention, _) in zip(found, layers, strict=True):
        attention.mitigation = copy.deepcopy(site.mitigation)  # parameters of the same names
    own = [{p.rpartition(".")[2]: x for p, x in a.mitigation.named_parameters()} for a, _ in layers]
    use_formula(plain, layers, own, strength=0.6 * ZOO[name].first_values)
    grads = with_gradients(model, inputs)
    torch.testing.assert_close(grads, with_gradients(plain, inputs), rtol=1e-10, atol=1e-10)
    assert all(gradient.any() for path, gradient in grads.items() if ".mitigation." in path)


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.first_values])
def test_neutreno(name):
    assert_parity(name, "neutreno:0.6", batch(name))


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, None) for name in ZOO), *((n, i) for n in EITHER for i in ("sdpa", "eager"))]
)
def test_a_chain_of_learnt_mitigations(name, implementation):
    learn = "layer" if implementation == "eager" else "head"
    parts = ["attnscale"]  # first: it scales A, whatever is added afterwards
    parts += [f"neutreno:0.6,learn={learn}"] if ZOO[name].first_values else []
    parts += ["featscale"] if not ZOO[name].causal and name not in WITHOUT_MEAN else []
    assert_parity(name, "+".join(parts), batch(name, padded="featscale" not in parts), implementation)
