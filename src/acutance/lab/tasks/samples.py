"""Samples of a task's data on which models are measured: chosen at random, the same for all models and seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acutance.lab.data.seeds import generator
from acutance.lab.tasks import task_class

AT_ONCE = 50  # samples in a batch


def samples(config: Any, split: str, count: int) -> list[Tensor]:
    """Batches in the form the task's model takes, as for evaluation; `config` is a run's."""
    return list(_read(config.task, split, count).split(AT_ONCE))


def tested_on(config: Any, count: int, data_dir: Path | None) -> Tensor:
    """So many of the test set as one tensor; the data may have moved."""
    return _read(config.task if data_dir is None else replace(config.task, data_dir=str(data_dir)), "test", count)


def name_of(config: Any) -> str:
    """What the samples are of."""
    task = config.task
    return str(getattr(task, "dataset", getattr(task, "corpus", task.kind)))


def _read(config: Any, split: str, count: int) -> Tensor:
    """So many different samples, or all there are, in ascending order."""
    task = task_class(config.kind)(config, seed=0, device=torch.device("cpu"))
    chosen = torch.randperm(task.size(split), generator=generator("cpu", 0))[:count].sort().values
    return task.inputs(split, chosen.tolist())
