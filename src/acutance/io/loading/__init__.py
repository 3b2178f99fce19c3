"""Models by name, and the text and images to feed them: what stands between a command line and the verbs.

A model is written `hf:` and the name of a model on the Hugging Face Hub, a local folder or a GGUF file; `timm:` and a
pretrained model's name or a local folder; or the path of one of our own checkpoints or runs.
"""

from __future__ import annotations

from pathlib import Path

import torch

from acutance.errors import AcutanceError
from acutance.io.loading import huggingface, own, timm
from acutance.io.loading.base import LoadedModel
from acutance.io.loading.batches import Batches
from acutance.io.loading.data import batches_for
from acutance.io.loading.images import ImageBatches, image_batches
from acutance.io.loading.text import TextBatches, text_batches

__all__ = [
    "Batches",
    "ImageBatches",
    "LoadedModel",
    "TextBatches",
    "batches_for",
    "image_batches",
    "load_model",
    "text_batches",
]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str,
    *,
    head: bool = False,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> LoadedModel:
    """A pretrained model and what is needed to feed it.

    Args:
        name: `hf:…`, `timm:…` or the path of a checkpoint or run of our own.
        head: for `hf:`, the whole model its checkpoint was saved from (for generating, training, saving again)
            instead of the bare backbone, which is all that measuring needs and cheaper to run. Others are always whole.
        device: where the model goes.
        dtype: what its weights are turned into, e.g. `bfloat16`; by default they stay as they are stored.
    """
    wanted = _dtype(dtype)
    if name in ("", "hf:", "timm:"):  # an empty path is the current folder
        raise AcutanceError(f"{name!r} names no model: write hf:NAME, timm:NAME or the path of a checkpoint or run")
    if name.startswith("hf:"):
        loaded = huggingface.load(name, head=head)
    elif name.startswith("timm:"):
        loaded = timm.load(name)
    else:
        loaded = own.load(Path(name))
    loaded.model.to(device=device, dtype=wanted)
    return loaded


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise AcutanceError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
