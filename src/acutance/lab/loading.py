"""Answers for `io` about runs and the embedded digits. `io` finds them by the entry point `acutance.loaders`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.io.inputs import Batches, of_dtype
from acutance.lab.train.run import Run
from acutance.models import ViT

SAMPLES = 1000  # of a run's test data, chosen at random, unless a number is given


def refuse_unfinished(checkpoint: Path) -> None:
    """Raise if this is the model's path in an unfinished run."""
    run = Run(checkpoint.parent)
    named = checkpoint in (run.model_path, run.best_path)
    if named and run.exists() and run.result() is None:
        raise AcutanceError(f"there is no {checkpoint}: the run is not finished. {run.how_to_go_on()}")


def data_of(path: Path, model: nn.Module) -> dict[str, Callable[..., Batches]]:
    """The data that a model reads by default: its run's test data, if `path` is a run, and the digits if they fit."""
    from acutance.lab.data import digits
    from acutance.lab.tasks import samples

    def batches(name: str, read: Callable[[int | None, Path | None], tuple[Tensor, ...]]) -> Callable[..., Batches]:
        def make(limit: int | None = None, data_dir: Path | None = None, batch: int = 64) -> Batches:
            inputs, *labels = read(limit, data_dir)
            parts = (of_dtype(inputs, next(model.parameters()).dtype), *labels)
            return Batches([*zip(*parts, strict=True)], batch, f"{len(inputs)} {name}", stacked)

        return make

    found = {}
    if (run := Run(path)).exists():
        task = run.config().task

        def tested(limit: int | None, data_dir: Path | None) -> tuple[Tensor, ...]:
            moved = task if data_dir is None else replace(task, data_dir=str(data_dir))
            return samples(moved, "test", limit or SAMPLES)

        name = getattr(task, "dataset", getattr(task, "corpus", task.kind))
        found["own"] = batches(f"test samples of {name}, as the run has them", tested)
    if isinstance(model, ViT) and (model.config.image_size, model.config.in_chans) == (8, 1):

        def embedded(limit: int | None, data_dir: Path | None) -> tuple[Tensor, ...]:
            test = digits()[1]
            return test.images[:limit], test.labels[:limit]

        found["digits"] = batches("test images of the embedded digits", embedded)
    return found


def stacked(samples: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """A batch of inputs, and one of labels where there are some."""
    return tuple(torch.stack(part) for part in zip(*samples, strict=True))
