"""Every table and figure of the two papers by one command: its runs, its measurements and the published numbers."""

from collections.abc import Mapping

from acutance.errors import AcutanceError
from acutance.lab.reproduce import neutreno, oversmoothing
from acutance.lab.reproduce.target import Row, Target, Training
from acutance.lab.train.config import hint

__all__ = ["TARGETS", "TIMES", "Row", "Target", "Training", "find"]

TARGETS: Mapping[str, Target] = {target.name: target for target in (*neutreno.TARGETS, *oversmoothing.TARGETS)}
TIMES = (
    "A plain run of 5 million images of 32×32 took 93 s on an H200, with NeuTRENO 94 to 98 s. The very first run "
    "compiled everything and took 141 s. Other runs on GPUs have not been timed. Divide their images by the images/s "
    "that `acutance bench` measures on your GPU, or start one, which shows the time left."
)


def find(name: str) -> Target:
    """A target by name. One without anything to run is refused."""
    if name not in TARGETS:
        meant = hint(name, TARGETS)
        raise AcutanceError(f"there is no target {name!r}{meant}; `acutance reproduce --list` names them")
    target = TARGETS[name]
    if target.measure is None:
        raise AcutanceError(f"{name} has nothing to run: {target.notes}")
    return target
