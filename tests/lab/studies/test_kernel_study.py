"""The kernel assumptions of several runs: what the command reads, groups and writes."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from typer.testing import CliRunner

from acutance.cli.studies import app
from acutance.errors import AcutanceError
from acutance.io.loading import load_model
from acutance.io.saving import load, save
from acutance.lab.data import digits
from acutance.lab.studies import kernel_assumptions, kernel_study
from acutance.lab.studies.kernel import PAPER, batch_count, variant_of
from acutance.models import ViT

OPTIONS = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 12, "depth": 2, "heads": 3, "num_classes": 10}


def model(seed: int, **options) -> ViT:
    torch.manual_seed(seed)
    made = ViT(**OPTIONS, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.fixture
def runs(tmp_path):
    for seed in (0, 1):
        save(model(seed), tmp_path / f"plain-seed{seed}" / "model.safetensors")
        save(model(seed, attention="symmetric"), tmp_path / f"even-seed{seed}" / "model.safetensors")
    return tmp_path


def test_the_command_writes_what_a_direct_reading_gives(runs) -> None:
    names = [str(runs / "plain-seed0"), str(runs / "plain-seed1" / "model.safetensors")]
    names += [str(runs / f"even-seed{seed}") for seed in (0, 1)]
    out = runs / "kernel"
    done = CliRunner().invoke(app, ["kernel", *names, "--samples", "9", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "plain, 2 runs" in done.output
    table = pd.read_csv(out / "kernel.csv")
    assert len(table) == 4 * 2 * 2 * 3  # runs, data, layers, heads
    assert set(table["variant"]) == {"plain", "even"}
    train, test = digits()
    direct = {}
    for data, split in (("train", train), ("test", test)):
        images = split.images[torch.linspace(0, len(split) - 1, 9).round().long()]
        for seed in (0, 1):
            direct[data, seed] = kernel_assumptions(load(runs / f"plain-seed{seed}/model.safetensors"), [images])
    chosen = table.query("run == 'plain-seed1' and data == 'train'").set_index(["layer", "head"])
    for row in direct["train", 1].rows():
        for name, value in row.items():
            if name not in ("layer", "head"):
                assert chosen.loc[(row["layer"], row["head"]), name] == pytest.approx(value, rel=1e-3, abs=1e-6)
    found = direct["train", 1]
    expected = spearmanr(found.samples["kernel_asymmetry"][1].ravel(), found.alignment[1].ravel()).statistic
    assert chosen.loc[(2, 3), "correlation_kernel_asymmetry"] == pytest.approx(expected, rel=1e-3)
    body = json.loads((out / "kernel.json").read_text())
    assert body["paper"] == PAPER
    assert body["samples"] == {"train": 9, "test": 9}
    assert body["command"].startswith("acutance lab kernel ")
    summary = {(row["variant"], row["data"]): row for row in body["summary"]}
    means = [direct["test", seed].alignment.mean() for seed in (0, 1)]
    assert summary["plain", "test"]["alignment"]["mean"] == pytest.approx(np.mean(means))
    assert summary["plain", "test"]["alignment"]["spread"] == pytest.approx(np.std(means, ddof=1))
    pooled = [direct["test", seed].correlations()["kernel_negative"] for seed in (0, 1)]
    assert summary["plain", "test"]["pooled"]["kernel_negative"]["mean"] == pytest.approx(np.mean(pooled))
    within = [direct["test", seed].layer_correlations()["kernel_negative"].mean() for seed in (0, 1)]
    assert summary["plain", "test"]["within"]["kernel_negative"]["mean"] == pytest.approx(np.mean(within))
    assert summary["even", "test"]["alignment"]["mean"] == pytest.approx(1, abs=1e-5)
    assert summary["even", "test"]["pooled"]["kernel_negative"]["mean"] is None  # nothing varies
    assert (out / "kernel.png").stat().st_size > 10_000
    assert "</svg>" in (out / "kernel.svg").read_text()


def test_runs_are_one_variant_up_to_their_seed() -> None:
    assert variant_of("neutreno-featscale-seed12") == "neutreno-featscale"
    assert variant_of("seed3-plain") == "seed3-plain"


def test_one_model_is_held_at_a_time_and_every_batch_announced() -> None:
    heard, loaded = [], []

    def load(seed: int) -> ViT:
        loaded.append(len(heard))
        return model(seed)

    study = kernel_study({f"a-seed{n}": partial(load, n) for n in (0, 1)}, samples=70, advance=heard.append)
    assert loaded == [0, 4]
    assert heard == [f"a-seed{n}, {data}" for n in (0, 1) for data in ("train", "train", "test", "test")]
    assert len(heard) == 2 * batch_count(70)
    assert study.runs["a-seed1", "test"].alignment.shape == (2, 70, 3)
    with pytest.raises(AcutanceError, match="no models"):
        kernel_study({})


@pytest.fixture
def causal(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path / "causal-seed0"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    sizes = {"hidden_size": 12, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    torch.manual_seed(0)
    LlamaModel(LlamaConfig(**sizes, vocab_size=len(words))).save_pretrained(folder)
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 9)
    return folder


def test_a_causal_model_is_read_on_text(causal, tmp_path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    words = ["kernel", f"hf:{causal}", "--text", str(text), "--tokens", "6", "--samples", "5", "--out", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    body = json.loads((out / "kernel.json").read_text())
    assert body["samples"] == {"text.txt": 5}
    assert f"--samples 5 --text {text} --tokens 6" in body["command"]
    loaded = load_model(f"hf:{causal}")
    direct = kernel_assumptions(loaded.model, loaded.text_batches(text, tokens=6, limit=5))
    (row,) = body["summary"]
    assert row["variant"] == "causal"
    assert row["kernel_negative"]["mean"] == pytest.approx(direct.samples["kernel_negative"].mean(), rel=1e-5)
    assert row["weights_asymmetry"]["mean"] == pytest.approx(direct.weights_asymmetry.mean(), rel=1e-5)
    assert 0 < row["kernel_negative_permuted"]["mean"] < 0.5
    table = pd.read_csv(out / "kernel.csv")
    assert set(table["data"]) == {"text.txt"}
    assert table["kernel_asymmetry_permuted"].notna().all()


def test_text_needs_a_tokenizer_and_tokens_need_text(runs) -> None:
    with pytest.raises(AcutanceError, match="bare ViT, without the tokenizer"):
        kernel_study({"a": partial(model, 0)}, text="a.txt")
    with pytest.raises(AcutanceError, match="needs --text"):
        CliRunner().invoke(app, ["kernel", str(runs / "even-seed0"), "--tokens", "8"], catch_exceptions=False)


def test_runs_of_one_name_are_refused(runs) -> None:
    twice = [str(runs / "even-seed0"), str(runs / "even-seed0" / "model.safetensors")]
    with pytest.raises(AcutanceError, match="one name: even-seed0, even-seed0"):
        CliRunner().invoke(app, ["kernel", *twice], catch_exceptions=False)
