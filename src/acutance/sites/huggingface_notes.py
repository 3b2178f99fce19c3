"""What a model of transformers carries, noted in the configuration that is saved with it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
    """Make `save_pretrained` note what the model carries wherever it was put.

    A part that is mitigated by itself does not know the model around it, and may have a copy of its configuration: only
    who saves knows the whole.
    """
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    @wraps(save)
    def save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
        from acutance import sites

        vars(model.config).pop(NOTE, None)  # of parts, or out of date
        if any(isinstance(module, Mitigation) for module in model.modules()):
            sites.remember(model)
        return save(model, *args, **options)

    cast(Any, PreTrainedModel).save_pretrained = save_pretrained


def remember(model: nn.Module, record: Mapping[str, str]) -> None:
    """In the configuration, which `save_pretrained` writes; by class, since parts share their model's."""
    if "transformers" in sys.modules:
        note_when_saving()
    if not is_pretrained(model):
        return
    config: Any = model.config
    noted = dict(getattr(config, NOTE, {}))
    noted.pop(type(model).__name__, None)
    if record:
        noted[type(model).__name__] = dict(record)
    if noted:
        setattr(config, NOTE, noted)
    elif hasattr(config, NOTE):
        delattr(config, NOTE)
