"""The Monitor as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acutance.errors import MissingExtraError

if TYPE_CHECKING:
    from acutance.monitor.core import Monitor


def trainer_callback(monitor: Monitor) -> Any:
    """A `TrainerCallback`; the Trainer's `global_step` counts optimiser steps."""
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingExtraError("for_trainer needs transformers: pip install 'acutance[hf]' accelerate") from error

    class MonitorCallback(TrainerCallback):
        """Reads what the Monitor watches as the Trainer goes."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.check_watched(kwargs["model"])
            monitor.record(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.step(state.global_step)
            if state.global_step >= state.max_steps:  # on_train_end may come after the best weights were put back
                monitor.finish(state.global_step)

    return MonitorCallback()
