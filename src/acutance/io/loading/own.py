"""Checkpoints and runs of our own models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from acutance.errors import AcutanceError
from acutance.io.loading.base import LoadedModel, OwnData, Preprocess
from acutance.io.loading.images import centre_crop
from acutance.models import LanguageModel, Segmenter, ViT, from_checkpoint

# What ImageNet models of this family, DeiT's among them, are trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(path: Path) -> LoadedModel:
    """A checkpoint, or the one in a run's folder."""
    if (path / "config.json").is_file():
        raise AcutanceError(f"{path} is a folder of transformers: write hf:{path}")
    checkpoint = path / "model.safetensors" if path.is_dir() else path
    if not checkpoint.is_file():
        _refuse_unfinished(checkpoint)
        elsewhere = "" if path.is_dir() else f"; a model of transformers is written hf:{path}, one of timm timm:{path}"
        raise AcutanceError(f"no checkpoint at {checkpoint}{elsewhere}; `acutance demo` writes some to try")
    model = from_checkpoint(checkpoint)
    own = _data_of(path)
    if isinstance(model, LanguageModel):  # its words are a corpus's, which the file does not have
        return LoadedModel(str(path), model, own=own)
    takes_digits = isinstance(model, ViT) and (model.config.image_size, model.config.in_chans) == (8, 1)
    return LoadedModel(str(path), model, preprocess=lambda: _preprocess(model), on_digits=takes_digits, own=own)


def _refuse_unfinished(checkpoint: Path) -> None:
    """A run has no model until it is finished."""
    from acutance.lab.train.run import Run

    run = Run(checkpoint.parent)
    named = checkpoint in (run.model_path, run.best_path)
    if named and run.exists() and run.names_format() and run.result() is None:
        raise AcutanceError(f"there is no {checkpoint}: the run is not finished. {run.how_to_go_on()}")


def _data_of(folder: Path) -> OwnData | None:
    """What a run's model is tested on, as the run has it; the demo's runs have a record of another kind."""
    from acutance.lab.tasks.samples import name_of, tested_on
    from acutance.lab.train.run import Run

    run = Run(folder)
    if not run.exists() or not run.names_format():
        return None
    config = run.config()
    return OwnData(name_of(config), partial(tested_on, config))


def _preprocess(model: ViT | Segmenter) -> Preprocess:
    size = model.config.image_size
    if model.config.in_chans != 3:
        raise AcutanceError(
            f"--images takes colour images, the model has {model.config.in_chans} channels. From Python, "
            "ac.measure(model, batches) takes any data"
        )
    return centre_crop((size, size), MEAN, STD, fraction=224 / 256)
