"""`acutance measure` and `acutance explain`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import acutance as ac
from acutance.cli.options import HTML, JSON, DataOptions, Model, Part, console, option, spread, words, write
from acutance.errors import AcutanceError
from acutance.measure import DEFAULT_METRICS

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")


@dataclass(frozen=True)
class MeasureOptions(DataOptions):
    """What is measured, and where."""

    metrics: Annotated[str, option("Comma-separated names, or all.")] = ",".join(DEFAULT_METRICS)
    tap: Annotated[str, option("Comma-separated: block, attention, values, final.")] = "block"
    prefix: Annotated[str, option("Class, register and special tokens in or out of the metrics.")] = "in"
    part: Part = None

    @property
    def chosen(self) -> dict[str, Any]:
        metrics = "all" if self.metrics.strip() == "all" else words(self.metrics)
        return {"metrics": metrics, "tap": words(self.tap), "prefix": self.prefix}

    def check(self, model: str, *, reads: bool = True) -> None:
        from acutance.measure.reader import MetricReader

        super().check(model, reads=reads)
        MetricReader(**self.chosen)  # refuses unknown names

    def profile(self, loaded: Any, batches: Any) -> Any:
        found = ac.measure(loaded.model, batches, part=self.part, across_processes=True, **self.chosen)
        return replace(found, context={**found.context, "name": loaded.name, "data": batches.description})


@spread
def measure(
    model: Model,
    options: MeasureOptions,
    deviations: Annotated[bool, option("Print standard deviations over samples too.", "--spread")] = False,
    json_path: JSON = None,
    html_path: HTML = None,
) -> None:
    """Print how smooth a model's tokens are, layer by layer, read on text, on images or on the embedded digits.

    A run is read on its own test data.

    Examples: acutance measure acutance-demo/plain-seed0 --tap block,attention --html profile.html

    acutance measure runs/cifar100-seed0 --limit 200

    acutance measure hf:gpt2 --text wiki.test.txt --limit 64

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance measure …
    """
    from acutance.distributed import joined

    with joined() as (rank, _):
        loaded = options.load(model)
        profile = options.profile(loaded, options.batches(loaded))
    if rank == 0:
        show(profile, json_path, html_path, spread=deviations)


@spread
def explain(
    model: Model,
    options: DataOptions,
    data: Annotated[str | None, option("Read attention too, on the digits, or a run's own test data.")] = None,
    prefix: Annotated[str, option("Class and register tokens in or out of HFC/LFC.")] = "in",
    part: Part = None,
    norm: Annotated[str, option("fold the pre-norm's weight into H, or ignore it.")] = "fold",
    whole: Annotated[bool | None, option("All eigenvalues of H, or the largest; by rank if not given.")] = None,
    json_path: JSON = None,
    html_path: HTML = None,
    picture_path: Annotated[Path | None, option("Also draw it here: .png, .svg, …", "--picture")] = None,
    kind: Annotated[str | None, option("What to draw: histogram, plane or, with data, dominance.")] = None,
) -> None:
    """Print, per layer, whether it smooths or sharpens and which part does, and the spectra of H = W_projᵀW_Vᵀ and A.

    What a layer does is measured on text, images or the digits. Without data its weights tell a tendency.

    Examples: acutance explain acutance-demo/plain-seed0 --data digits --html spectrum.html

    acutance explain hf:gpt2 --text wiki.test.txt --tokens 128 --limit 16
    """
    from acutance.explain.spectrum import Picture

    with_data = (data, options.text, options.images) != (None, None, None)
    if not with_data and (options.tokens, options.batch, options.limit) != (None, None, None):
        raise AcutanceError("--tokens, --batch and --limit are about data: give --text, --images or --data too")
    if kind is not None and picture_path is None:
        raise AcutanceError(f"--kind says what --picture draws: give --picture FILE with --kind {kind}")
    if kind not in (None, *get_args(Picture)):
        raise AcutanceError(f"unknown picture {kind!r}; known: {', '.join(get_args(Picture))}")
    if picture_path is not None and picture_path.suffix.lower() not in PICTURES:
        raise AcutanceError(f"--picture {picture_path}: its ending says the format: one of {', '.join(PICTURES)}")
    loaded = options.load(model, reads=with_data)
    batches = options.batches(loaded, data) if with_data else None
    choices: dict[str, Any] = {"norm": norm, "prefix": prefix}  # explain refuses unknown ones
    spectrum = ac.explain(loaded.model, batches, whole=whole, part=part, **choices)
    show(spectrum, json_path, html_path)
    drawn: Any = kind or ("dominance" if spectrum.has_data else "histogram")
    write(picture_path, lambda path: spectrum.plot(drawn).savefig(path, dpi=150))


def show(result: Any, json_path: Path | None, html_path: Path | None, **how: Any) -> None:
    """Print a profile, a spectrum or a comparison, and write it where that is asked for."""
    console.print(result.table(**how))
    write(json_path, result.save)
    write(html_path, result.to_html)
