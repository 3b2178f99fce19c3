"""Several processes share one measurement: the same numbers as one process, to the last digits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_weights import MINILM, packaged
from tiny_folders import DECLARATION

from acutance.io.saving import save
from acutance.measure.profile import Profile
from acutance.models import ViT
from forked import run_as_torchrun, run_forked

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def digits(folder: Path, limit: int) -> list[str]:
    """A model of our own on the embedded digits."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 12, "depth": 2, "heads": 2, "num_classes": 10}
    checkpoint = save(ViT(**sizes), folder / "model.safetensors")
    return [str(checkpoint), "--metrics", "all", "--batch", "32", "--limit", str(limit)]


def minilm(_folder: Path, limit: int) -> list[str]:
    """all-MiniLM-L6-v2 on real text; the special tokens out, and the last window shorter than the others."""
    pytest.importorskip("transformers")
    weights = packaged(MINILM, "model/config.json").parent
    text = ["--text", str(DECLARATION), "--tokens", "200", "--batch", "3", "--prefix", "out"]
    return [f"hf:{weights}", *text, "--metrics", "token_cosine,effective_rank,attention_entropy,attention_cosine"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "samples", "launched"),
    [
        (digits, 150, True),  # by torchrun itself; elsewhere two processes are told what it tells its own
        (digits, 20, False),  # one batch: the second process has nothing to read
        (minilm, 8, False),
    ],
)
def test_two_processes_give_the_numbers_of_one(what, samples: int, launched: bool, tmp_path) -> None:
    asked = ["measure", *what(tmp_path, samples), "--dtype", "float64", "--tap", "block,attention", "--json"]
    alone = run_forked(*asked, tmp_path / "one.json", COLUMNS="250")
    both = by_torchrun if launched else run_as_torchrun
    for processes in ([alone], both([*asked, tmp_path / "two.json"], COLUMNS="250")):
        assert [done.returncode for done in processes] == [0] * len(processes), processes
        printed = "".join(done.stdout for done in processes)
        assert printed.count("mean ± standard deviation") == 1, "only the first process prints"
    one, two = (Profile.load(tmp_path / name) for name in ("one.json", "two.json"))
    # Forked processes have imported more, of which they tell the versions.
    assert two.context.pop("versions").items() <= one.context.pop("versions").items()
    assert two.context == one.context
    assert two.context["samples"] == samples
    assert len(two.readings) == len(one.readings)
    for ours, theirs in zip(two.readings, one.readings, strict=True):
        assert (ours.tap, ours.layer, ours.metric, ours.count) == (theirs.tap, theirs.layer, theirs.metric, samples)
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-12)
        assert ours.std == pytest.approx(theirs.std, rel=1e-12, abs=1e-14)


def by_torchrun(arguments, **environment) -> list[subprocess.CompletedProcess]:
    command = [sys.executable, *LAUNCHER, "-m", "acutance", *map(str, arguments)]
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return [subprocess.run(command, capture_output=True, text=True, env=told, check=False)]
