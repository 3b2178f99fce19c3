"""Options that several commands share, written once and spread over the command lines that take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from acutance.io.loading import DTYPES
from acutance.measure import DEFAULT_METRICS

MODEL_HELP = (
    "hf: and a model on the Hugging Face Hub, a folder or a GGUF file; timm: and a pretrained model or a folder; "
    "a checkpoint written by Acutance (model.safetensors), or the folder of a run."
)


def words(text: str) -> list[str]:
    """What stands between commas, with blanks after them or without."""
    return [word.strip() for word in text.split(",")]


@dataclass(frozen=True)
class DataOptions:
    """What a model reads, and how it is computed."""

    text: Annotated[Path | None, typer.Option(help="Read this text file, or the .txt files of a folder.")] = None
    images: Annotated[Path | None, typer.Option(help="Read the images of this folder and its subfolders.")] = None
    data_dir: Annotated[Path | None, typer.Option(help="Where a run's own data is now, if not where it was.")] = None
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of a window of text; by default the model's context, 512 at most.")
    ] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per batch.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many windows or images.")] = None
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto"
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default as stored.")] = None


@dataclass(frozen=True)
class MeasureOptions(DataOptions):
    """And what is measured where."""

    metrics: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = ",".join(DEFAULT_METRICS)
    tap: Annotated[str, typer.Option(help="Comma-separated: block, attention, values, final.")] = "block"
    prefix: Annotated[str, typer.Option(help="Class, register and special tokens in or out of the metrics.")] = "in"
    part: Annotated[
        str | None, typer.Option(help="Submodule to read, of a model with several stacks: encoder, model.decoder, …")
    ] = None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every argument that is a group of options replaced by those options."""
    taken = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in taken if is_dataclass(p.annotation)}

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    flat: list[inspect.Parameter] = []
    for parameter in taken:
        flat += _options(groups[parameter.name]) if parameter.name in groups else [parameter]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    )
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
