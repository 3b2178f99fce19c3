"""`acutance measure`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, cast

from acutance.cli.options import HTML, JSON, DataOptions, Model, Part, option, show, spread, words
from acutance.measure import DEFAULT_METRICS

if TYPE_CHECKING:
    from acutance.io.inputs import Batches, LoadedModel
    from acutance.measure.profile import Profile


@dataclass(frozen=True)
class MeasureOptions(DataOptions):
    """What is measured, and where."""

    metrics: Annotated[str, option("Comma-separated names, or all.")] = ",".join(DEFAULT_METRICS)
    tap: Annotated[str, option("Comma-separated: block, attention, values, final.")] = "block"
    prefix: Annotated[str, option("Class, register and special tokens in or out of the metrics.")] = "in"
    part: Part = None

    def profile(self, loaded: "LoadedModel", batches: "Batches") -> "Profile":
        """The model's profile on these batches."""
        import acutance as ac

        profile = ac.measure(
            loaded.model,
            batches,
            metrics="all" if self.metrics.strip() == "all" else words(self.metrics),
            tap=words(self.tap),
            prefix=cast(Literal["in", "out"], self.prefix),  # measure refuses anything else
            part=self.part,
            across_processes=True,
        )
        return replace(profile, context={**profile.context, "name": loaded.name, "data": batches.description})


@spread
def measure(model: Model, options: MeasureOptions, json_path: JSON = None, html_path: HTML = None) -> None:
    """Print how smooth a model's tokens are, layer by layer, read on text, on images or on the embedded digits.

    A run is read on its own test data.

    Examples: acutance measure acutance-demo/plain-seed0 --tap block,attention --html profile.html

    acutance measure runs/cifar100-seed0 --limit 200

    acutance measure hf:gpt2 --text wiki.test.txt --limit 64

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance measure …
    """
    import torch

    from acutance.distributed import joined

    torch.manual_seed(0)  # the same command writes the same file
    with joined() as (rank, _):
        loaded = options.load(model)
        profile = options.profile(loaded, options.batches(loaded))
    if rank == 0:
        show(profile, json_path, html_path)
