"""Real weights on real text: what `measure` reads is what the model itself hands out."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import acutance as ac
from acutance.io import Batches, load_model
from tiny_folders import DECLARATION, MINILM, SMOLLM2, packaged

pytest.importorskip("transformers", reason="the weights are loaded by transformers")


def expected(model, batches: Batches) -> dict[tuple[str, int], float]:
    """The same figures from what the model returns, sample by sample without padding, by eager attention."""
    read: dict[tuple[str, int], list[float]] = {}
    model.set_attn_implementation("eager")
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            with torch.no_grad():
                output = model(ids[mask.bool()][None], output_hidden_states=True, output_attentions=True)
            for layer, tokens in enumerate(output.hidden_states):
                read.setdefault(("token_cosine", layer), []).append(float(ac.metrics.token_cosine(tokens)))
            for layer, weights in enumerate(output.attentions, 1):
                entropy = torch.special.entr(weights).sum(-1).mean()
                read.setdefault(("attention_entropy", layer), []).append(float(entropy))
    return {key: np.mean(values) for key, values in read.items()}


def test_minilm_reads_as_it_returns() -> None:
    minilm = load_model(f"hf:{packaged(MINILM, 'model/config.json').parent}", dtype="float64")
    batches = minilm.text_batches(DECLARATION, tokens=200, batch=3)
    assert batches[-1]["attention_mask"].sum(1).tolist()[-1] < 200, "the last window is shorter: there is padding"
    profile = ac.measure(minilm.model, batches, metrics=["token_cosine", "attention_entropy"], progress=False)
    assert profile.context["samples"] == len(batches.samples)
    found = {(r.metric, r.layer): r.mean for r in profile.readings}
    assert found == pytest.approx(expected(minilm.model, batches), rel=1e-9)


@pytest.mark.slow
def test_smollm2_is_unpacked_rightly(tmp_path: Path, monkeypatch) -> None:
    gguf = pytest.importorskip("gguf")
    # transformers makes the same table of names again for every module, and reads the same file three times.
    for slow in ("get_tensor_name_map", "GGUFReader"):
        monkeypatch.setattr(gguf, slow, cache(getattr(gguf, slow)))
    smollm2 = load_model(f"hf:{packaged(SMOLLM2, '.gguf').parent}", head=True)
    (tmp_path / "question.txt").write_text("The capital of France is")
    (batch,) = smollm2.text_batches(tmp_path)
    with torch.no_grad():
        scores = smollm2.model(input_ids=batch["input_ids"]).logits[0, -1]
    assert smollm2.tokenizer().decode([int(scores.argmax())]).strip() == "Paris"
