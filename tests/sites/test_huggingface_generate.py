"""Mitigated models that generate: with a cache or without, padded or alone, packed or apart."""

import pytest
import torch

import acutance as ac
from acutance.errors import AcutanceError
from sites.hf_zoo import build, in_float64, library
from sites.tiny_models import mitigated

DECODERS = {
    **{name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Gemma2", "Gemma3", "Mistral", "Qwen3")},
    "gpt2": "GPT2LMHeadModel",
}
TWO_STACKS = {"bart_decoder": "BartForConditionalGeneration", "t5_decoder": "T5ForConditionalGeneration"}
HEADS = DECODERS | TWO_STACKS
NEW = 10  # more than the sliding windows hold together with the prompt
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def made(name):
    """With everything that can be in a decoder, learnt parameters away from zero."""
    model = build(name, head=HEADS[name])
    mitigated(model.get_decoder() if name in TWO_STACKS else model, "attnscale+neutreno:0.6")
    return model


def prompts(rows, tokens, seed=0):
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    settings = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW} | options
    with in_float64():
        return model.generate(ids, return_dict_in_generate=True, output_logits=True, **settings)


def logits(result):
    return torch.stack(result.logits, 1)


GREEDY = [*((name, 5, 1) for name in HEADS), ("llama", 1, 1), ("t5_decoder", 1, 1)]
BEAMS = [(name, 5, 3) for name in ("llama", "gemma3", *TWO_STACKS)]


@pytest.mark.parametrize(("name", "tokens", "beams"), GREEDY + BEAMS)
def test_a_cache_changes_nothing(name, tokens, beams):
    model, ids = made(name), prompts(2, tokens)
    with_cache, without = (generate(model, ids, use_cache=use_cache, num_beams=beams) for use_cache in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(logits(with_cache), logits(without), **EXACT)
    if beams > 1:
        torch.testing.assert_close(with_cache.sequences_scores, without.sequences_scores, **EXACT)
    plain = generate(build(name, head=HEADS[name]), ids, num_beams=beams)
    assert not torch.allclose(logits(plain), logits(without), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "use_cache"), [*((name, True) for name in DECODERS), ("llama", False)])
def test_a_row_padded_on_the_left_is_the_row_alone(name, use_cache):
    model, ids = made(name), prompts(2, 9)
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    together = generate(model, ids, attention_mask=mask, use_cache=use_cache)
    for row, start in ((0, 0), (1, 4)):
        alone = generate(model, ids[row : row + 1, start:], use_cache=use_cache)
        assert torch.equal(alone.sequences[0], together.sequences[row, start:])
        torch.testing.assert_close(logits(alone)[0], logits(together)[row], **EXACT)


@pytest.mark.parametrize("name", TWO_STACKS)
def test_both_stacks_of_one_model(name):
    model = made(name)
    ids, mask = prompts(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    before = generate(model, ids, attention_mask=mask)
    ac.mitigate(model.get_encoder(), "neutreno:0.6")
    together = generate(model, ids, attention_mask=mask)
    assert not torch.equal(logits(before), logits(together))
    alone = generate(model, ids[1:, :5])
    assert torch.equal(alone.sequences[0], together.sequences[1])
    torch.testing.assert_close(logits(alone)[0], logits(together)[1], **EXACT)


def test_a_static_cache_is_refused():
    model = made("llama")
    with pytest.raises(AcutanceError, match=r"StaticCache.*dynamic cache"):
        generate(model, prompts(2, 5), cache_implementation="static")
    assert generate(model, prompts(2, 5)).sequences.shape == (2, 5 + NEW)
    cache = library().StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), pytest.raises(AcutanceError, match="dynamic cache"):
        torch.compile(model.model, backend="eager")(prompts(2, 5), past_key_values=cache)
