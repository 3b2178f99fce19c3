"""What holds for the remedies that apply A twice, change its scores or mix its heads, beside the formulas."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import acutance as ac
from acutance.attention import call as calls
from acutance.errors import AcutanceError
from acutance.mitigations import parse
from attention.operator_cases import normal
from parity.parity_remedies import reattention
from sites.hf_zoo import build, in_float64
from sites.tiny_models import causal, encoder, images, left_alone, mitigated, recorded, tokens, vit

CAUSAL = ["twicing", "gfsa", "contranorm:0.2", "lsa", "elliptical", "rpc:threshold=0.2,all_layers=true"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("spec", CAUSAL)
def test_no_token_hears_of_padding_or_of_the_future(spec):
    model, x, mask = build("llama"), normal(2, 9, 32), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    mitigated(model, spec)
    with in_float64(), torch.no_grad():
        run = lambda x, **given: model(inputs_embeds=x, **given).last_hidden_state  # noqa: E731
        found = run(x, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
        torch.testing.assert_close(run(x[:1, :6]), found[:1, :6], **EXACT)
        torch.testing.assert_close(run(x[1:, 4:]), found[1:, 4:], **EXACT)


@pytest.mark.parametrize("spec", ["lsa", "elliptical", "rpc:threshold=0.2", "elliptical+lsa"])
def test_the_operator_that_is_read_is_the_one_that_was_applied(spec):
    model = encoder()
    mitigated(model, spec)
    _, records = recorded(lambda: model(tokens(), mask=causal(5)), ac.sites.find(model))
    for call in records:
        torch.testing.assert_close(call.A.apply(call.values), call.output, rtol=1e-10, atol=1e-12)
        assert spec != "lsa" or call.A.diagonal()[..., 1:].max() < 1e-12


def test_reattention_norms_by_the_batch_in_training_and_by_what_it_has_seen_in_evaluation():
    model = vit()
    mitigated(model, "reattention")
    parts = [site.mitigation for site in ac.sites.find(model)]
    for training in (True, False):
        model.train(training)
        _, records = recorded(lambda: model(images()), ac.sites.find(model))
        for part, call in zip(parts, records, strict=True):
            at = SimpleNamespace(A=torch.softmax(call.q @ call.k.mT / 2, -1), w=call.values)
            own = {name.rpartition(".")[2]: p for name, p in part.named_parameters()}
            seen = None if training else (part.norm.running_mean, part.norm.running_var)
            torch.testing.assert_close(reattention(at, own, {}, seen), call.output, **EXACT)


def test_orders_without_meaning_are_refused():
    for spec, advice in {
        "shaped+gfsa": "shaped before it has changed: write gfsa:4[+]shaped",
        "lsa+rpc": "lsa before it has changed: write rpc[+]lsa",
        "neutreno:0.6+reattention": "neutreno before it has changed: write reattention[+]neutreno:0.6",
        "twicing+reattention": "twicing before it has changed: use one of them",
    }.items():
        with pytest.raises(AcutanceError, match=advice):
            parse(spec)


def test_what_cannot_work_is_refused():
    model = vit(attention_dropout=0.1).train()
    for spec, why in {
        "twicing:from_layer=0": "counts from 1",
        "gfsa:1": "at least 2",
        "contranorm:0.1,temperature=0": "cannot be 0",
        "contranorm:form=bert": "'plain' or 'identity'",
        "rpc:iterations=0": "at least 1",
    }.items():
        with left_alone(model), pytest.raises(AcutanceError, match=why):
            ac.mitigate(model, spec)
    for spec, options, why in (
        ("twicing", {}, "attention dropout"),
        ("elliptical", {"layers": [1, 3]}, "consecutive layers"),
        ("reattention", {}, r"whole attention matrix.*reattention:large=true"),
    ):
        with ac.mitigate(model, spec, **options), pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "MOST_TOKENS", 4)
            with pytest.raises(AcutanceError, match=why):
                model(images())
    with ac.mitigate(model, "reattention:large=true"):
        assert torch.isfinite(model(images())).all()
    causal_encoder = partial(encoder(), mask=causal(5))
    with ac.mitigate(causal_encoder.func, "reattention"), pytest.raises(AcutanceError, match="a mask hides some"):
        causal_encoder(tokens())
