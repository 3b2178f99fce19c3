"""`acutance explain`."""

from pathlib import Path
from typing import Annotated, Any, get_args

from acutance.cli.options import HTML, JSON, DataOptions, Model, Part, option, show, spread, write
from acutance.errors import AcutanceError

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")


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
    """Print, per layer, whether the spectra of H = W_projᵀW_Vᵀ and A smooth or sharpen, and why.

    Without data the weights decide alone; text, images or the digits are read for the attention too.

    Examples: acutance explain acutance-demo/plain-seed0 --data digits --html spectrum.html

    acutance explain hf:gpt2 --text wiki.test.txt --tokens 128 --limit 16
    """
    import acutance as ac
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
    loaded = options.load(model)
    batches = options.batches(loaded, data) if with_data else None
    choices: dict[str, Any] = {"norm": norm, "prefix": prefix}  # explain refuses unknown ones
    spectrum = ac.explain(loaded.model, batches, whole=whole, part=part, **choices)
    show(spectrum, json_path, html_path)
    drawn: Any = kind or ("dominance" if spectrum.has_data else "histogram")
    write(picture_path, lambda path: spectrum.plot(drawn).savefig(path, dpi=150))
