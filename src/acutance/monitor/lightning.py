"""The Monitor as a callback of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acutance.errors import MissingExtraError

if TYPE_CHECKING:
    from acutance.monitor.core import Monitor


def lightning_callback(monitor: Monitor) -> Any:
    """A `Callback`; Lightning's `global_step` counts optimiser steps, those of all optimisers together."""
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise MissingExtraError("for_lightning needs lightning: pip install lightning") from error

    class MonitorCallback(Callback):
        """Reads what the Monitor watches as the Trainer goes."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            monitor.check_watched(pl_module)
            monitor.record(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            monitor.step(trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.finish(trainer.global_step)

    return MonitorCallback()
