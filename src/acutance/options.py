"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acutance.loading import DTYPES
from acutance.measure import DEFAULT_METRICS

ALL_DEFAULT_METRICS = ",".join(DEFAULT_METRICS)
MODEL_HELP = (
    "hf: and a model on the Hugging Face Hub, a folder or a GGUF file; timm: and a pretrained model or a folder; "
    "a checkpoint written by Acutance (model.safetensors), or the folder of a run."
)
TextOption = Annotated[Path | None, typer.Option(help="Read this text file, or the .txt files of a folder.")]
ImagesOption = Annotated[Path | None, typer.Option(help="Read the images of this folder and its subfolders.")]
TokensOption = Annotated[
    int | None, typer.Option(min=1, help="Length of a window of text; by default the model's context, 512 at most.")
]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Samples per batch.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Stop after so many windows or images.")]
MetricsOption = Annotated[str, typer.Option(help="Comma-separated names, or all.")]
TapOption = Annotated[str, typer.Option(help="Comma-separated: block, attention, values, final.")]
PrefixOption = Annotated[str, typer.Option(help="Class, register and special tokens in or out of the metrics.")]
PartOption = Annotated[
    str | None, typer.Option(help="Submodule to read, of a model with several stacks: encoder, model.decoder, …")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
DtypeOption = Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default as stored.")]
