"""Training: one loop for one process or many, whose runs can be cut anywhere and go on to the same bits."""

from acutance.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig
from acutance.train.interrupt import StoppedError
from acutance.train.nonfinite import DivergedError
from acutance.train.overrides import override
from acutance.train.run import Run
from acutance.train.start import train

__all__ = [
    "Config",
    "DivergedError",
    "LoopConfig",
    "OptimConfig",
    "Run",
    "ScheduleConfig",
    "StoppedError",
    "override",
    "train",
]
