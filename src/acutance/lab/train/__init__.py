"""Training: one loop for one process or many. An interrupted run resumes and ends in the same bits."""

from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig, override
from acutance.lab.train.log import DivergedError, StoppedError
from acutance.lab.train.run import Run
from acutance.lab.train.start import train

__all__ = [
    "Config", "DivergedError", "LoopConfig", "OptimConfig", "Run", "ScheduleConfig", "StoppedError", "override",
    "train",
]  # fmt: skip
