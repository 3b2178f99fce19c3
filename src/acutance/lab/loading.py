"""What io asks about runs and the embedded digits, found by the entry point `acutance.loaders`."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from acutance.errors import AcutanceError
from acutance.io.inputs import OwnData
from acutance.lab.train.run import Run

SAMPLES = 1000  # of a run's test data, chosen at random, unless more or fewer are asked for


def refuse_unfinished(checkpoint: Path) -> None:
    """Raise if this would be the model of a run that is not finished."""
    run = Run(checkpoint.parent)
    named = checkpoint in (run.model_path, run.best_path)
    if named and run.exists() and run.result() is None:
        raise AcutanceError(f"there is no {checkpoint}: the run is not finished. {run.how_to_go_on()}")


def test_data(folder: Path) -> OwnData | None:
    """The test data of a run's task; None if the folder holds no run."""
    from acutance.lab.tasks import samples

    run = Run(folder)
    if not run.exists():
        return None
    task = run.config().task
    name = getattr(task, "dataset", getattr(task, "corpus", task.kind))

    def read(limit: int | None, data_dir: Path | None) -> Tensor:
        moved = task if data_dir is None else replace(task, data_dir=str(data_dir))
        return samples(moved, "test", limit or SAMPLES)

    return OwnData(f"test samples of {name}, as the run has them", read)


def digits() -> OwnData:
    """The embedded digits' test images."""
    from acutance.lab.data import digits

    return OwnData("test images of the embedded digits", lambda limit, _: digits()[1].images[:limit])
