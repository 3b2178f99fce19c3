"""Several processes share one measurement: the same numbers as one process, to the last digits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_weights import MINILM, packaged
from tiny_folders import DECLARATION

from acutance.models import ViT, save_checkpoint
from acutance.profile import Profile

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def digits(folder: Path, limit: int) -> list[str]:
    """A model of our own on the embedded digits."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 12, "depth": 2, "heads": 2, "num_classes": 10}
    checkpoint = save_checkpoint(ViT(**sizes), folder / "model.safetensors")
    return [str(checkpoint), "--metrics", "all", "--batch", "32", "--limit", str(limit)]


def minilm(_folder: Path, limit: int) -> list[str]:
    """all-MiniLM-L6-v2 on real text; the special tokens out, and the last window shorter than the others."""
    pytest.importorskip("transformers")
    weights = packaged(MINILM, "model/config.json").parent
    text = ["--text", str(DECLARATION), "--tokens", "200", "--batch", "3", "--prefix", "out"]
    return [f"hf:{weights}", *text, "--metrics", "token_cosine,effective_rank,attention_entropy,attention_cosine"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "samples"),
    [(digits, 150), (digits, 20), (minilm, 8)],  # 20 images are one batch: the second process has nothing to read
)
def test_two_processes_give_the_numbers_of_one(what, samples: int, tmp_path) -> None:
    asked = what(tmp_path, samples)

    def profile(name: str, *launcher: str) -> Profile:
        options = ["--dtype", "float64", "--tap", "block,attention", "--json", str(tmp_path / name)]
        command = [sys.executable, *launcher, "-m", "acutance", "measure", *asked, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "250"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("mean ± standard deviation") == 1, "only the first process prints"
        return Profile.load(tmp_path / name)

    alone, together = profile("one.json"), profile("two.json", *LAUNCHER)
    assert together.context == alone.context
    assert together.context["samples"] == samples
    assert len(together.readings) == len(alone.readings)
    for ours, theirs in zip(together.readings, alone.readings, strict=True):
        assert (ours.tap, ours.layer, ours.metric, ours.count) == (theirs.tap, theirs.layer, theirs.metric, samples)
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-12)
        assert ours.std == pytest.approx(theirs.std, rel=1e-12, abs=1e-14)
