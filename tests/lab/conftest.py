import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acutance.__main__ import app
from acutance.lab import recipes
from acutance.lab.train import override, train

SMALL = ["task.model.depth=2", "task.model.dim=12", "loop.epochs=2", "loop.monitor_every=none", "loop.ema=none"]
SMALL += ["task.model.mitigation=neutreno:0.6"]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run trained on digits. Tests that write anything but evaluations into it must use `copy`."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(override(recipes.load("digits"), SMALL), folder, recipe="digits", device="cpu")
    return folder


@pytest.fixture(scope="session")
def command():
    """Runs `acutance` with these words in this process and returns its output; errors are raised."""

    def call(*words):
        words = [*map(str, words)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["acutance", *words])
            done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    return call


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))
