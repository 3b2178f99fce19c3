"""Real weights on real text: what `measure` reads is what the model itself hands out."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import acutance as ac
from acutance.io import Batches, load_model
from acutance.measure.profile import Profile
from tiny_folders import DECLARATION, MINILM, SMOLLM2, packaged

pytest.importorskip("transformers", reason="the weights are loaded by transformers")

METRICS = ["token_cosine", "attention_entropy"]


def expected(model, batches: Batches, *, last_is_normed: bool) -> dict:
    """The same figures from what the model returns, sample by sample without padding, by eager attention."""
    read: dict[tuple[str, int], list[float]] = {}
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            with torch.no_grad():
                inputs = {"input_ids": ids[mask.bool()][None], "output_hidden_states": True, "output_attentions": True}
                output = model(**inputs)
            streams = output.hidden_states[:-1] if last_is_normed else output.hidden_states
            for layer, tokens in enumerate(streams):
                read.setdefault(("token_cosine", layer), []).append(float(ac.metrics.token_cosine(tokens)))
            for layer, weights in enumerate(output.attentions, 1):
                entropy = torch.special.entr(weights).sum(-1).mean()
                read.setdefault(("attention_entropy", layer), []).append(float(entropy))
    model.set_attn_implementation(before)
    return {key: np.mean(values) for key, values in read.items()}


def compare(profile: Profile, wanted: dict, rel: float = 1e-9) -> None:
    found = {(r.metric, r.layer): r.mean for r in profile.readings}
    assert wanted.keys() <= found.keys()
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=rel)


def test_minilm_reads_as_it_returns() -> None:
    minilm = load_model(f"hf:{packaged(MINILM, 'model/config.json').parent}", dtype="float64")
    batches = minilm.text_batches(DECLARATION, tokens=200, batch=3)
    assert batches[-1]["attention_mask"].sum(1).tolist()[-1] < 200, "the last window is shorter: there is padding"
    profile = ac.measure(minilm.model, batches, metrics=METRICS, progress=False)
    assert profile.context["samples"] == len(batches.samples)
    compare(profile, expected(minilm.model, batches, last_is_normed=False))


@pytest.mark.slow
def test_smollm2_reads_as_it_returns_and_is_unpacked_rightly(tmp_path: Path, monkeypatch) -> None:
    """Its file is found in its folder."""
    gguf = pytest.importorskip("gguf")
    # transformers makes the same table of names again for every module, which takes longer than reading the file.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    smollm2 = load_model(f"hf:{packaged(SMOLLM2, '.gguf').parent}", head=True, dtype="float64")
    (tmp_path / "question.txt").write_text("The capital of France is")
    (batch,) = smollm2.text_batches(tmp_path)
    with torch.no_grad():
        scores = smollm2.model(input_ids=batch["input_ids"]).logits[0, -1]
    assert smollm2.tokenizer().decode([int(scores.argmax())]).strip() == "Paris"
    (tmp_path / "longer.txt").write_text(" ".join(DECLARATION.read_text().split()[:40]))
    batches = smollm2.text_batches(tmp_path)
    assert batches[0]["attention_mask"].sum(1).unique().numel() == 2, "there is padding"
    profile = ac.measure(smollm2.model, batches, metrics=METRICS, progress=False)
    assert max(profile.layers("token_cosine")) == 30
    # Llama's norms, and its eager softmax, work in float32 whatever the weights are.
    compare(profile, expected(smollm2.model, batches, last_is_normed=True), rel=1e-5)
