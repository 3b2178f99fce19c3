"""What io asks about runs and the embedded digits, found by the entry point `acutance.loaders`."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.io.inputs import OwnData
from acutance.lab.train.run import Run
from acutance.models import ViT

SAMPLES = 1000  # of a run's test data, chosen at random, unless more or fewer are asked for


def refuse_unfinished(checkpoint: Path) -> None:
    """Raise if this would be the model of a run that is not finished."""
    run = Run(checkpoint.parent)
    named = checkpoint in (run.model_path, run.best_path)
    if named and run.exists() and run.result() is None:
        raise AcutanceError(f"there is no {checkpoint}: the run is not finished. {run.how_to_go_on()}")


def data_of(path: Path, model: nn.Module) -> dict[str, OwnData]:
    """What a model reads by itself: its run's test data, if the path is a run's folder, and the digits, if they fit."""
    from acutance.lab.data import digits
    from acutance.lab.tasks import samples

    found = {}
    if (run := Run(path)).exists():
        task = run.config().task

        def read(limit: int | None, data_dir: Path | None) -> Tensor:
            moved = task if data_dir is None else replace(task, data_dir=str(data_dir))
            return samples(moved, "test", limit or SAMPLES)

        name = getattr(task, "dataset", getattr(task, "corpus", task.kind))
        found["own"] = OwnData(f"test samples of {name}, as the run has them", read)
    if isinstance(model, ViT) and (model.config.image_size, model.config.in_chans) == (8, 1):
        found["digits"] = OwnData("test images of the embedded digits", lambda limit, _: digits()[1].images[:limit])
    return found
