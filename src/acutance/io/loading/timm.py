"""Models of timm, by name or from a local folder."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from acutance.errors import AcutanceError, MissingExtraError
from acutance.io.loading.base import LoadedModel, Preprocess
from acutance.io.loading.hub import loading
from acutance.io.loading.images import centre_crop


def load(name: str) -> LoadedModel:
    """The pretrained model behind `timm:…`."""
    timm = _library()
    wanted = name.removeprefix("timm:")
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        wanted, repository = f"local-dir:{folder}", None
    else:
        repository = _repository(timm, name, wanted)
    with loading(name, repository):
        model = timm.create_model(wanted, pretrained=True)
    return LoadedModel(name, model, preprocess=cache(lambda: _preprocess(timm, name, model)))


def _library() -> Any:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm: models need timm: pip install 'acutance[timm]'") from error
    except RuntimeError as error:  # how torchvision says that it was built for another torch
        raise AcutanceError(f"timm cannot be imported beside this torchvision and torch: {error}") from error
    return timm


def _repository(timm: Any, name: str, wanted: str) -> str | None:
    """Where the weights lie on the Hub; None where they come from elsewhere."""
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
    if config["crop_mode"] not in ("center", "squash"):
        raise AcutanceError(
            f"{name} crops by {config['crop_mode']!r}, which is not known here. From Python, "
            "ac.measure(model, batches) takes any data"
        )
    return centre_crop(
        _size(model) or tuple(config["input_size"][1:]),
        config["mean"],
        config["std"],
        fraction=config["crop_pct"],
        interpolation=config["interpolation"],
        mode=config["crop_mode"],
    )


def _size(model: nn.Module) -> tuple[int, int] | None:
    """The one size of images that the model takes; its configuration may have that of the weights it was made from."""
    embedding = getattr(model, "patch_embed", None)
    size: tuple[int, int] | None = getattr(embedding, "img_size", None)
    return size if getattr(embedding, "strict_img_size", False) else None
