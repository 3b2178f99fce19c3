"""Commands on models of transformers, from folder to folder."""

import re
from pathlib import Path

import pytest
import torch
from tiny_folders import DECLARATION, save_bert

from acutance.measure.profile import Profile
from forked import run_forked

pytest.importorskip("transformers", reason="models of transformers are loaded")


def acutance(*arguments: object) -> str:
    done = run_forked(*arguments, COLUMNS="200", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_mitigated_model_is_saved_with_all_it_needs_and_read_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, out, profile = tmp_path / "plain", tmp_path / "out", tmp_path / "profile.json"
    save_bert(plain)
    data = ("--text", DECLARATION, "--tokens", "32", "--limit", "6", "--metrics", "token_cosine")
    printed = acutance("mitigate", f"hf:{plain}", "neutreno:0.6", *data, "--out", out)
    rows = re.findall(r"block +│ +(\d) │ (\S+) → (\S+)", printed)
    assert [layer for layer, _, _ in rows] == ["0", "1", "2"]
    assert rows[-1][1] != rows[-1][2]
    acutance("measure", f"hf:{out}", *data, "--json", profile)
    again = Profile.load(profile)
    assert again.context["model"] == "BertForMaskedLM", "the head is still there"
    assert again.context["mitigation"] == "neutreno:0.6"
    assert again.context["data"] == "6 windows of 32 tokens from declaration.txt"
    assert [f"{mean:.4f}" for mean in again["token_cosine"]] == [after for _, _, after in rows]
