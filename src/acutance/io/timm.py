"""Models of timm, by name or from a local folder."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from acutance.errors import AcutanceError, MissingExtraError
from acutance.io.hub import loading
from acutance.io.inputs import LoadedModel, Preprocess, centre_crop


def load(name: str) -> LoadedModel:
    """The pretrained model behind `timm:…`."""
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm: models need timm: pip install 'acutance[timm]'") from error
    except RuntimeError as error:  # how torchvision says that it was built for another torch
        raise AcutanceError(f"timm cannot be imported beside this torchvision and torch: {error}") from error
    wanted = name.removeprefix("timm:")
    folder = Path(wanted).expanduser()
    is_local = folder.is_dir()
    with loading(name, None if is_local else _repository(timm, name, wanted)):
        model = timm.create_model(f"local-dir:{folder}" if is_local else wanted, pretrained=True)
    return LoadedModel(name, model, preprocess=cache(lambda: _preprocess(timm, name, model)))


def _repository(timm: Any, name: str, wanted: str) -> str | None:
    """The weights' repository on the Hub; None where they come from elsewhere."""
    if wanted.startswith("hf-hub:"):
        return wanted.removeprefix("hf-hub:")
    if not timm.is_model(wanted.split(".")[0]):
        close = get_close_matches(wanted, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise AcutanceError(f"{name}: timm {timm.__version__} knows no such model, and there is no such folder{hint}")
    if wanted not in timm.list_pretrained() and not timm.models.is_model_pretrained(wanted):
        raise AcutanceError(f"{name}: timm {timm.__version__} has no pretrained weights under this name")
    repository: str | None = timm.models.get_pretrained_cfg(wanted).hf_hub_id
    return repository


def _preprocess(timm: Any, name: str, model: nn.Module) -> Preprocess:
    """Evaluation's preprocessing from the model's own data configuration, by hand: its transforms need torchvision."""
    config = timm.data.resolve_model_data_config(model)
    mode, fraction, interpolation = config["crop_mode"], config["crop_pct"], config["interpolation"]
    if mode not in ("center", "squash"):
        raise AcutanceError(
            f"{name} crops by {mode!r}, which is not known here. From Python, ac.measure(model, batches) takes any data"
        )
    embedding = getattr(model, "patch_embed", None)
    # The configuration may have the size of the weights that the model was made from.
    only = getattr(embedding, "img_size", None) if getattr(embedding, "strict_img_size", False) else None
    size = only or tuple(config["input_size"][1:])
    return centre_crop(size, config["mean"], config["std"], fraction=fraction, interpolation=interpolation, mode=mode)
