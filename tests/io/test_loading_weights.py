"""Real weights on real text: what `measure` reads is what the model itself hands out."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_folders import DECLARATION, MINILM, SMOLLM2, packaged

import acutance as ac
from acutance.io import Batches, LoadedModel, load_model
from acutance.measure.profile import Profile

pytest.importorskip("transformers", reason="the weights are loaded by transformers")

METRICS = ["token_cosine", "attention_entropy"]


@pytest.fixture(scope="session")
def minilm() -> LoadedModel:
    return load_model(f"hf:{packaged(MINILM, 'model/config.json').parent}", dtype="float64")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The file is found in its folder."""
    gguf = pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        # transformers makes the same table of names again for every module, which takes longer than reading the file.
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        return load_model(f"hf:{packaged(SMOLLM2, '.gguf').parent}", head=True, dtype="float64")


@pytest.fixture(scope="session")
def two_texts(tmp_path_factory) -> Path:
    """One longer than the other, so that a batch of both is padded."""
    folder = tmp_path_factory.mktemp("texts")
    words = DECLARATION.read_text().split()
    (folder / "long.txt").write_text(" ".join(words[:40]))
    (folder / "short.txt").write_text(" ".join(words[100:117]))
    return folder


def cosine(tokens: np.ndarray) -> float:
    """The mean over pairs, pair by pair."""
    unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    pairs = unit @ unit.T
    return float(pairs[~np.eye(len(pairs), dtype=bool)].mean())


def entropy(weights: np.ndarray) -> float:
    """The mean over heads and rows, from the attention matrix itself."""
    logarithm = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    return float(-(weights * logarithm).sum(-1).mean())


def expected(model, batches: Batches, *, last_is_normed: bool, content_only: bool = False) -> dict:
    """The same figures from what the model returns, sample by sample without padding, by eager attention."""
    read: dict[tuple[str, int], list[float]] = {}
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for batch in batches:
        for ids, mask, special in zip(*(batch[k] for k in batch), strict=True):
            with torch.no_grad():
                inputs = {"input_ids": ids[mask.bool()][None], "output_hidden_states": True, "output_attentions": True}
                output = model(**inputs)
            keep = ~special[mask.bool()].bool().numpy() if content_only else slice(None)
            streams = output.hidden_states[:-1] if last_is_normed else output.hidden_states
            for layer, tokens in enumerate(streams):
                read.setdefault(("token_cosine", layer), []).append(cosine(tokens[0].numpy()[keep]))
            for layer, weights in enumerate(output.attentions, 1):
                read.setdefault(("attention_entropy", layer), []).append(entropy(weights[0].numpy()))
    model.set_attn_implementation(before)
    return {key: np.mean(values) for key, values in read.items()}


def compare(profile: Profile, oracle: dict, metrics=METRICS, rel: float = 1e-9) -> None:
    found = {(r.metric, r.layer): r.mean for r in profile.readings}
    wanted = {key: value for key, value in oracle.items() if key[0] in metrics}
    assert wanted.keys() <= found.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=rel), key


@pytest.mark.parametrize(("prefix", "metrics"), [("in", METRICS), ("out", ["token_cosine"])])
def test_minilm_reads_as_it_returns_with_special_tokens_and_without(minilm: LoadedModel, prefix, metrics) -> None:
    batches = minilm.text_batches(DECLARATION, tokens=200, batch=3)
    assert batches[-1]["attention_mask"].sum(1).tolist()[-1] < 200, "the last window is shorter: there is padding"
    profile = ac.measure(minilm.model, batches, metrics=metrics, prefix=prefix, progress=False)
    assert profile.context["samples"] == len(batches.samples)
    oracle = expected(minilm.model, batches, last_is_normed=False, content_only=prefix == "out")
    compare(profile, oracle, metrics)


@pytest.mark.slow
def test_smollm2_reads_as_it_returns_and_is_unpacked_rightly(
    smollm2: LoadedModel, two_texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "question.txt").write_text("The capital of France is")
    (batch,) = smollm2.text_batches(tmp_path)
    with torch.no_grad():
        scores = smollm2.model(input_ids=batch["input_ids"]).logits[0, -1]
    assert smollm2.tokenizer().decode([int(scores.argmax())]).strip() == "Paris"
    batches = smollm2.text_batches(two_texts)
    assert batches[0]["attention_mask"].sum(1).unique().numel() == 2, "there is padding"
    profile = ac.measure(smollm2.model, batches, metrics=METRICS, progress=False)
    assert max(profile.layers("token_cosine")) == 30
    # Llama's norms, and its eager softmax, work in float32 whatever the weights are.
    compare(profile, expected(smollm2.model, batches, last_is_normed=True), rel=1e-5)
