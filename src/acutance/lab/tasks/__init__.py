"""What can be trained, by the kind that a configuration names."""

from importlib import import_module
from typing import Any, get_args

import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data.seeds import generator
from acutance.lab.tasks.base import BatchSlice, Task

# Imported when asked for, since a task imports the modules of its data set and its model.
TASKS = {
    "classification": "acutance.lab.tasks.classification:ClassificationTask",
    "imagenet": "acutance.lab.tasks.imagenet:ImageNetTask",
    "segmentation": "acutance.lab.tasks.segmentation:SegmentationTask",
    "language": "acutance.lab.tasks.language:LanguageTask",
}

__all__ = ["TASKS", "BatchSlice", "Task", "config_class", "samples", "task_class"]


def task_class(kind: str) -> type[Task[Any]]:
    """The class of a kind of task."""
    if kind not in TASKS:
        raise AcutanceError(f"no task is called {kind!r}; there are {', '.join(TASKS)}")
    module, _, name = TASKS[kind].partition(":")
    found: type[Task[Any]] = getattr(import_module(module), name)
    return found


def config_class(kind: str) -> type[Any]:
    """The dataclass that configures a kind of task: what its class names in `Task[…]`."""
    bases: tuple[Any, ...] = task_class(kind).__orig_bases__  # type: ignore[attr-defined] # of every generic class
    return get_args(bases[0])[0]  # type: ignore[no-any-return]


def samples(config: Any, split: str, count: int) -> tuple[Tensor, ...]:
    """At most `count` samples of a task's data with their labels, if it has some.

    They are chosen at random, and the same for all models and seeds.
    """
    task = task_class(config.kind)(config, seed=0, device=torch.device("cpu"))
    chosen = torch.randperm(task.size(split), generator=generator("cpu", 0))[:count].sort().values
    return task.labelled(split, chosen.tolist())
