"""What a task says its scores depend on is what its evaluation reads, on every split."""

from dataclasses import is_dataclass

import pytest
import torch

import standins
from acutance.lab import recipes
from acutance.lab.evaluate.evaluate import DATA, ELSEWHERE, task_of
from acutance.lab.train.config import override


class Watched:
    """A configuration that notes which of its fields are read, by dotted name."""

    def __init__(self, config, noted, prefix=""):
        self._config, self._noted, self._prefix = config, noted, prefix

    def __getattr__(self, name):
        value = getattr(self._config, name)
        if is_dataclass(value):
            return Watched(value, self._noted, f"{self._prefix}{name}.")
        self._noted.add(self._prefix + name)
        return value


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("digits", []), ("deit_tiny", []), ("ade20k", ["task.encoder_weights=none"]), ("wikitext103", [])],
)
def test_evaluation_reads_what_its_task_says(tmp_path, recipe, changes):
    task = task_of(override(standins.shrink(recipes.load(recipe), tmp_path), changes), "cpu")
    torch.manual_seed(0)
    model, own = task.build_model(), task.config
    when_made = {"corpus"}  # the text is read with the task
    without_effect = {"held_out_every"}  # handed on with any split, and used on training images alone
    for split in ("train", "val", "test"):
        noted = set()
        task.config = Watched(own, noted)
        task.evaluate(model, split=split)
        read = {name for name in noted if not name.startswith("model.") and f"task.{name}" not in ELSEWHERE}
        said = set(task.evaluated_by(split))
        assert said - when_made == read - (without_effect if split == "test" else set())
        assert {f"task.{name}" for name in said & when_made} <= DATA
