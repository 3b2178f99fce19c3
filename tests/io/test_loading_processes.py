"""Several processes share one measurement: the same numbers as one process, to the last digits."""

import os
import subprocess
import sys

import pytest
import torch

import acutance as ac
from acutance.measure.profile import Profile
from forked import run_as_torchrun, run_forked

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def by_torchrun(arguments, **environment) -> list[subprocess.CompletedProcess]:
    command = [sys.executable, *LAUNCHER, "-m", "acutance", *map(str, arguments)]
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return [subprocess.run(command, capture_output=True, text=True, env=told, check=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "both"),
    [
        (150, by_torchrun),  # elsewhere two processes are told what torchrun tells its own
        (20, run_as_torchrun),  # one batch: the second process has nothing to read
    ],
)
def test_two_processes_give_the_numbers_of_one(samples: int, both, tmp_path) -> None:
    torch.manual_seed(0)
    checkpoint = ac.save(ac.models.vit_digits(dim=12, depth=2), tmp_path / "model.safetensors")
    asked = ["measure", checkpoint, "--metrics", "all", "--batch", "32", "--limit", samples]
    asked += ["--dtype", "float64", "--tap", "block,attention", "--json"]
    alone = run_forked(*asked, tmp_path / "one.json", COLUMNS="250")
    for processes in ([alone], both([*asked, tmp_path / "two.json"], COLUMNS="250")):
        assert [done.returncode for done in processes] == [0] * len(processes), processes
        printed = "".join(done.stdout for done in processes)
        assert printed.count("mean ± standard deviation") == 1, "only the first process prints"
    one, two = (Profile.load(tmp_path / name) for name in ("one.json", "two.json"))
    # Forked processes have imported more, of which they tell the versions.
    assert two.context.pop("versions").items() <= one.context.pop("versions").items()
    assert two.context == one.context
    assert two.context["samples"] == samples
    for ours, theirs in zip(two.readings, one.readings, strict=True):
        assert (ours.tap, ours.layer, ours.metric, ours.count) == (theirs.tap, theirs.layer, theirs.metric, samples)
        assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std), rel=1e-12, abs=1e-14)
