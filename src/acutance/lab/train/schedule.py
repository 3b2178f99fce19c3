"""Learning rates as functions of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from acutance.lab.train.config import ScheduleConfig


def warm_cosine(progress: float, warmup: float) -> float:
    """Linear from 0 to 1 over `warmup`, then a half cosine to 0; all are shares of the whole."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of this step, the first being 0.

    Args:
        config: the curve.
        peak: the rate at the end of the warm-up.
        step: steps taken so far.
        steps_per_epoch: turns the warm-up, given in epochs, into steps.
        total_steps: where the curve reaches `config.final`.
    """
    if config.per == "epoch":
        step -= step % steps_per_epoch
    warm = config.warmup * steps_per_epoch
    if step < warm:
        return config.start + (peak - config.start) * step / warm
    begin = 0.0 if config.warmup_inside else warm
    progress = min(1.0, (step - begin) / max(1.0, total_steps - begin))
    return config.final + (peak - config.final) * _curve(config, progress)


def _curve(config: ScheduleConfig, progress: float) -> float:
    """From 1 at the start to 0 at the end."""
    if config.name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if config.name == "poly":
        return float((1 - progress) ** config.power)
    return 1.0
