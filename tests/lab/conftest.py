import shutil
from pathlib import Path

import pytest

from acutance.lab import recipes
from acutance.lab.train import override, train

SMALL = ["task.model.depth=2", "task.model.dim=12", "loop.epochs=2", "loop.monitor_every=none", "loop.ema=none"]
SMALL += ["task.model.mitigation=neutreno:0.6"]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Trained on digits; who writes into it other than evaluations takes a copy."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(override(recipes.load("digits"), SMALL), folder, recipe="digits", device="cpu")
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))
