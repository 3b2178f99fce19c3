"""Weights on disk: safetensors of our own, and published ones. Nothing is ever unpickled but tensors."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from acutance.errors import AcutanceError, first_line
from acutance.files.atomic import atomic_write
from acutance.models.config import LanguageConfig, ModelConfig, SegmenterConfig, ViTConfig
from acutance.models.language import LanguageModel
from acutance.models.segmenter import Segmenter
from acutance.models.stack import BlockStack
from acutance.models.vit import ViT

PathLike = str | os.PathLike[str]
Model = ViT | LanguageModel | Segmenter
CONFIG_KEY = "acutance.config"  # in the safetensors metadata
CLASS_KEY = "acutance.model"  # a ViT where it is missing, as in the first files
MODELS: Mapping[str, tuple[type[Model], type[ModelConfig]]] = {
    "ViT": (ViT, ViTConfig),
    "LanguageModel": (LanguageModel, LanguageConfig),
    "Segmenter": (Segmenter, SegmenterConfig),
}


def save_checkpoint(model: Model, path: PathLike) -> Path:
    """Write weights and configuration as one safetensors file, whole or not at all."""
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    options = json.dumps(model.config.to_dict())
    metadata = {"format": "pt", CLASS_KEY: type(model).__name__, CONFIG_KEY: options}

    def write(file: Path) -> None:
        save_file(state, file, metadata)
        sort_metadata(file)

    return atomic_write(path, write)


def sort_metadata(file: Path) -> None:
    """Put a safetensors file's metadata in order, so that equal models are equal files.

    The library keeps it in a hash table, whose order changes from one call to the next; tensors it sorts by itself.
    """
    with file.open("rb+") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size, "the same entries in another order, and spaces"
        opened.seek(8)
        opened.write(text.ljust(size))


def from_checkpoint(path: PathLike) -> Model:
    """Rebuild the model that `save_checkpoint` wrote, mitigation included."""
    try:
        with safe_open(str(_existing(path)), framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _unreadable(path, error) from error
    if CONFIG_KEY not in metadata:
        raise AcutanceError(
            f"{path} carries no model configuration: build a plain model in Python and use acutance.load(path, model), "
            "or for published weights acutance.models.load_checkpoint"
        )
    try:
        options = json.loads(metadata[CONFIG_KEY])
    except ValueError as error:
        raise _unreadable(path, error) from error
    name = metadata.get(CLASS_KEY, "ViT")
    if name not in MODELS:
        raise AcutanceError(f"{path} holds a {name}, which this version does not know; known: {', '.join(MODELS)}")
    kind, configuration = MODELS[name]
    model = kind(**configuration.from_dict(options).to_dict())
    load_checkpoint(model, path)
    return model


def load_checkpoint(model: BlockStack | Segmenter, source: PathLike | Mapping[str, Any]) -> None:
    """Load weights, all of them or none; a position embedding of another grid is resized.

    Args:
        model: where the weights go: one of ours, or the encoder of a `Segmenter`.
        source: a safetensors file, a `.pth` file (a state dict, or DeiT's {"model": state dict}), or a
            mapping laid out like one.
    """
    label = "the state dict" if isinstance(source, Mapping) else str(source)
    state = _tensors(source if isinstance(source, Mapping) else _read(source), label)
    state = model.fit_state(state)
    _check_match(model.state_dict(), state, label)
    model.load_state_dict(state)


def _read(path: PathLike) -> Mapping[str, Any]:
    file = _existing(path)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file provokes
        raise _unreadable(path, error) from error
    if not isinstance(content, Mapping):
        raise AcutanceError(f"{path} holds a {type(content).__name__}, not a state dict")
    return content


def _tensors(content: Mapping[str, Any], label: str) -> dict[str, Tensor]:
    state = content["model"] if isinstance(content.get("model"), Mapping) else content
    other = [str(name) for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise AcutanceError(f"{label} is not a state dict: {_listed(other)} are no tensors. Pass the state dict itself")
    return dict(state)


def _check_match(own: Mapping[str, Tensor], state: Mapping[str, Tensor], label: str) -> None:
    """Compare before touching the model: load_state_dict copies what fits even when it then complains."""
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    sizes = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in sorted(own.keys() & state.keys())
        if own[name].shape != state[name].shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another size": sizes}
    if not any(problems.values()):
        return
    found = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
    advice = "build the model with the options the weights were trained with"
    if any(".mitigation." in name for name in missing):
        advice = "load it into a plain model, then add the mitigation with mitigate(model, …)"
    raise AcutanceError(f"{label} does not fit the model ({found}). To fix it, {advice}")


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _existing(path: PathLike) -> Path:
    file = Path(path)
    if not file.is_file():
        raise AcutanceError(f"there is no file {path}")
    return file


def _unreadable(path: PathLike, error: Exception) -> AcutanceError:
    # What torch says of a pickle is how to load it all the same.
    reason = "" if isinstance(error, pickle.UnpicklingError) else f" ({first_line(error)})"
    return AcutanceError(
        f"{path} cannot be read as weights: it is damaged, or holds more than tensors, which is refused "
        f"because unpickling could run code{reason}. Fetch it again, or save its state dict alone"
    )
