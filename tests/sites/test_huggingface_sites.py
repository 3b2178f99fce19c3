"""Every architecture of the zoo: its sites, what they say of the weights, and what they see."""

from pathlib import Path

import pytest
import torch
from hf_zoo import ZOO, batch, build, in_float64, output, part_of, records, table
from torch import Tensor, nn
from torch.nn.functional import linear

import acutance as ac
from acutance import sites
from acutance.attention.products import repeat_heads

TWO_BRANCHES = ("ViT", "DeiT", "Beit", "Dino", "DINO", "CLIP", "Siglip", "Llama", "Granite", "Qwen", "Mi", "GPT2", "T5")
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


class Watch:
    """What goes into and comes out of chosen modules during a forward pass, by plain hooks."""

    def __init__(self, *modules: nn.Module) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        for module in modules:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def _enter(self, module, args, kwargs):
        self.inputs[module] = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)

    def _leave(self, module, _args, result):
        self.outputs[module] = result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_an_architecture(name):
    model, entry = build(name), ZOO[name]
    part, inputs = part_of(name, model), batch(name)
    found = sites.find(part)
    assert [site.layer for site in found] == list(range(1, len(entry.heads) + 1))
    assert [(site.heads, site.kv_heads) for site in found] == list(entry.heads)
    assert sites.special_tokens(part).front == entry.prefix
    watch = Watch(*[module for site in found for module in site.block.modules()])
    for implementation in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        model.set_attn_implementation(implementation)
        for padded in (False, True) if "attention_mask" in inputs else (True,):  # without padding there is no mask
            seen = assert_observed(model, found, batch(name, padded=padded))
    for site, record in zip(found, seen, strict=True):
        entered = watch.inputs[site.attention]
        if not hasattr(site.attention, "sequence_reduction"):  # SegFormer makes its keys fewer first
            values = linear(entered, site.value_weight(), site.projections().value.offset()).unflatten(
                -1, (site.kv_heads, -1)
            )
            values = repeat_heads(values.transpose(1, 2), record.values.shape[1])  # some models repeat them themselves
            torch.testing.assert_close(values, record.values, **TOLERANCE)
            assert_queries_and_keys(site, record, entered)
        branch = linear(
            record.output.transpose(1, 2).flatten(2), site.projection_weight(), site.projections().output.offset()
        )
        torch.testing.assert_close(branch, record.branch, **TOLERANCE)
        assert_pre_norm(site, watch, expected=entry.pre_norm and not (name == "modernbert" and site.layer == 1))
        assert_residual(site, watch, record.branch)


def assert_observed(model, found, inputs):
    """Watching changes nothing, and the operator is the model's own."""
    with in_float64():
        plain = output(model, inputs)
        result, seen = records(model, inputs, found)
    assert torch.equal(result, plain)
    assert len(seen) == len(found)
    mask = inputs.get("attention_mask")
    for record in seen:
        difference = record.A @ record.values - record.output
        if mask is not None and record.output.shape[::2] == mask.shape:
            # Queries that are padding: libraries differ in what they get, and nothing reads it.
            difference = difference.masked_fill(mask[:, None, :, None] == 0, 0)
        assert difference.abs().max() < 1e-10
    return seen


def assert_queries_and_keys(site, record, entered):
    """At the first token, which rotary positions leave alone; between samples, so that biases drop out."""
    if any("norm" in name for name, _ in site.attention.named_modules()):
        return
    difference = entered[1, 0] - entered[0, 0]
    q, k = (x[1, :, 0] - x[0, :, 0] for x in (record.A.q, record.A.k))
    if type(site.attention).__name__.startswith(("OPT", "Esm", "Whisper")):  # which scale their queries beforehand
        q = q * site.head_dim**0.5
    for weight, entering in ((site.query_weight(), q), (site.key_weight(), k)):
        expected = (weight @ difference).unflatten(0, (-1, site.head_dim))
        expected = expected.repeat_interleave(len(entering) // len(expected), 0)  # as some models do themselves
        torch.testing.assert_close(expected, entering, **TOLERANCE)


def assert_pre_norm(site, watch, expected):
    norm, entered = site.pre_norm(), watch.inputs[site.attention]
    assert (norm is not None) == expected
    source = watch.inputs[site.block] if norm is None else watch.outputs[norm]
    assert torch.equal(entered.flatten().sort().values, source.flatten().sort().values)  # Swin sorts into windows
    if norm is None:
        return
    assert torch.equal(watch.inputs[norm].flatten(), watch.inputs[site.block].flatten())
    token = 1000 * (1 - 2 * (torch.arange(site.dim) % 2)).double()  # normalised already, up to 1000
    with in_float64():
        gain = (norm(token) - norm(-token)) / 2 * token.sign()
    said = site.pre_norm_gain()
    torch.testing.assert_close(torch.ones(site.dim).double() if said is None else said, gain, rtol=1e-6, atol=1e-6)


def assert_residual(site, watch, branch):
    """x + gain ⊙ branch enters the next norm, where blocks are made of two branches and nothing stands between."""
    if type(site.block).__name__.startswith(TWO_BRANCHES):
        gain = 1 if site.branch_gain() is None else site.branch_gain()
        expected = watch.inputs[site.block] + gain * branch
        streams = [watch.inputs[m] for m in site.block.modules() if type(m).__name__.endswith("Norm")]
        assert any(s.shape == expected.shape and torch.allclose(s, expected, rtol=0, atol=1e-12) for s in streams)
    else:
        assert site.branch_gain() is None


def test_what_a_block_does_is_found_while_it_is_mitigated():
    model = build("qwen3")  # has norms in its attention, but none before W_proj
    with ac.mitigate(model, "neutreno:0.6"):
        assert [site.between() for site in sites.find(model)] == [None] * 3


def test_the_documentation_lists_the_zoo():
    page = Path(__file__).parents[2] / "docs" / "libraries.md"
    assert table() in page.read_text(encoding="utf-8"), f"put this into {page}:\n{table()}"
