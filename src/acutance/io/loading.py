"""Models by name, as the command line takes them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from acutance.errors import AcutanceError
from acutance.io import pretrained
from acutance.io.inputs import LoadedModel, Preprocess, centre_crop
from acutance.io.saving import load
from acutance.models import LanguageModel, ViT

DTYPES = ("float32", "float64", "bfloat16", "float16")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as DeiT's


def load_model(
    name: str, *, head: bool = False, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None
) -> LoadedModel:
    """A pretrained model and what is needed to feed it.

    Args:
        name: `hf:` and a model on the Hugging Face Hub, a folder or a GGUF file; `timm:` and a pretrained model's name
            or a folder; or the path of a checkpoint or run of our own.
        head: for `hf:`, the whole model its checkpoint was saved from (for generating, training, saving again)
            instead of the bare backbone, which is all that measuring needs and cheaper to run. Others are always whole.
        device: where the model goes.
        dtype: what its weights are turned into, e.g. `bfloat16`; by default they stay as they are stored.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise AcutanceError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if name in ("", "hf:", "timm:"):  # an empty path is the current folder
        raise AcutanceError(f"{name!r} names no model: write hf:NAME, timm:NAME or the path of a checkpoint or run")
    if name.startswith("hf:"):
        loaded = pretrained.load_transformers(name, head=head)
    else:
        loaded = pretrained.load_timm(name) if name.startswith("timm:") else _own(Path(name))
    loaded.model.to(device=device, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return loaded


def _own(path: Path) -> LoadedModel:
    """A checkpoint of our own, or the one in a run's folder."""
    if (path / "config.json").is_file():
        raise AcutanceError(f"{path} is a folder of transformers: write hf:{path}")
    runs = _runs()
    checkpoint = path / "model.safetensors" if path.is_dir() else path
    if not checkpoint.is_file():
        if runs is not None:
            runs.refuse_unfinished(checkpoint)
        elsewhere = "" if path.is_dir() else f"; a model of transformers is written hf:{path}, one of timm timm:{path}"
        raise AcutanceError(f"no checkpoint at {checkpoint}{elsewhere}; `acutance demo` writes some to try")
    model: Any = load(checkpoint)
    own = None if runs is None else runs.test_data(path)
    if isinstance(model, LanguageModel):  # its words are a corpus's, which the file does not have
        return LoadedModel(str(path), model, own=own)
    takes_digits = isinstance(model, ViT) and (model.config.image_size, model.config.in_chans) == (8, 1)
    digits = runs.digits() if runs is not None and takes_digits else None

    def preprocess() -> Preprocess:
        if (channels := model.config.in_chans) != 3:
            raise AcutanceError(f"--images takes colour images, the model has {channels} channels: use Python")
        return centre_crop((model.config.image_size,) * 2, MEAN, STD, fraction=224 / 256)

    return LoadedModel(str(path), model, preprocess=preprocess, own=own, digits=digits)


@cache
def _runs() -> Any:
    """What lab knows of runs and of the digits. The core does not import lab, so it is found by an entry point."""
    return next((found.load() for found in entry_points(group="acutance.loaders")), None)
