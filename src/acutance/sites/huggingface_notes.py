"""What a model of transformers carries, noted in the configuration that is saved with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, cast

from torch import nn

from acutance.mitigations import Mitigation

NOTE = "acutance"  # where a configuration keeps what the model carries


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a transformers model; asked without importing the library."""
    cls = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return cls is not None and isinstance(module, cls)


@cache
def note_when_saving() -> None:
    """Make `save_pretrained` note what the model carries, wherever in it that was put.

    Only who saves knows the whole: a part that is mitigated by itself does not know the model around it, and may share
    its configuration or have a copy of it. So the note is there while it is written, and never out of date.
    """
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    @wraps(save)
    def save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
        with _noted(model):
            return save(model, *args, **options)

    cast(Any, PreTrainedModel).save_pretrained = save_pretrained


def forget(config: Any) -> None:
    """Take the notes out of a configuration and those inside it, such as CLIP's of its towers."""
    inside = list(vars(config).values())
    vars(config).pop(NOTE, None)
    for part in inside:
        if hasattr(part, "model_type"):
            forget(part)


@contextmanager
def _noted(model: Any) -> Iterator[None]:
    """With the note of the whole model, by its class, in its configuration."""
    from acutance import sites

    forget(model.config)  # what was read from a file
    mitigated = any(isinstance(module, Mitigation) for module in model.modules())
    record = sites.record(model) if mitigated else {}
    try:
        if record:
            setattr(model.config, NOTE, {type(model).__name__: record})
        yield
    finally:
        forget(model.config)


def remember() -> None:
    """What transformers' models carry is saved with them from now on."""
    if "transformers" in sys.modules:
        note_when_saving()
