"""What a run is made of, as plain data: written with the run, rebuilt from it, and overridable field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from acutance.errors import AcutanceError
from acutance.lab.train.plain import field_types, from_plain, to_plain, unknown_field

OptimiserName = Literal["adamw", "adam", "sgd", "muon"]
ScheduleName = Literal["cosine", "poly", "constant"]
Precision = Literal["fp32", "bf16"]
Strategy = Literal["auto", "single", "ddp", "fsdp"]

# How the range of a field is said, how it is asked, and which fields have it.
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("more than 0", lambda value: value > 0, "loop.epochs loop.evaluate_every optim.clip"),
    (
        "1 or more",
        lambda value: value >= 1,
        "loop.batch_size loop.accumulate loop.checkpoint_every loop.keep_last loop.log_every loop.monitor_every",
    ),
    (
        "0 or more",
        lambda value: value >= 0,
        "optim.lr optim.weight_decay optim.eps schedule.warmup schedule.start schedule.final",
    ),
    ("at least 0 and less than 1", lambda value: 0 <= value < 1, "optim.betas optim.momentum loop.ema"),
)


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser. Biases, norms, embeddings of position and class, and mitigations get no weight decay."""

    name: OptimiserName = "adamw"
    lr: float = 1e-3  # the peak, for the whole batch; recipes state how it was scaled
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9  # of sgd, which is Nesterov's
    clip: float | None = None  # the largest gradient norm; None never clips


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves: a linear warm-up, then a curve that ends at `final`."""

    name: ScheduleName = "cosine"
    warmup: float = 0.0  # in epochs
    start: float = 0.0  # the learning rate at which the warm-up begins
    final: float = 0.0
    power: float = 0.9  # of poly
    per: Literal["step", "epoch"] = "step"  # how often it moves; DeiT moves once an epoch
    warmup_inside: bool = False  # the curve runs from step 0, hidden by the warm-up (DeiT), instead of following it


@dataclass(frozen=True)
class LoopConfig:
    """How long, how exactly and on what the loop runs."""

    epochs: float = 10
    batch_size: int = 128  # over all processes and accumulated parts
    accumulate: int = 1  # parts of a batch whose gradients are added before a step
    seed: int = 0
    precision: Precision = "fp32"
    compile: bool = False
    graph: bool = False  # the step becomes one CUDA graph, for one process and undivided batches; else it does nothing
    deterministic: bool = False
    strategy: Strategy = "auto"  # auto: ddp under torchrun, else single
    ema: float | None = None  # decay of the running mean of the weights; None keeps none
    checkpoint_every: int = 500  # steps
    keep_last: int = 2
    evaluate_every: float = 1  # epochs; the last one is always evaluated
    log_every: int = 50  # steps
    monitor_every: int | None = None  # steps between readings of smoothness; None reads none


@dataclass(frozen=True)
class Config:
    """A whole run. `task` is one of the dataclasses in `acutance.lab.tasks`; its `kind` names it on disk."""

    task: Any
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        for words, holds, names in RANGES:
            for name in names.split():
                part, _, key = name.partition(".")
                value = getattr(getattr(self, part), key)
                if value is not None and not all(map(holds, value if isinstance(value, tuple) else (value,))):
                    raise AcutanceError(f"{name} must be {words}, not {value}")
        if self.loop.batch_size % self.loop.accumulate:
            raise AcutanceError(
                f"a batch of {self.loop.batch_size} cannot be cut into {self.loop.accumulate} equal parts: "
                "choose loop.accumulate so that it divides loop.batch_size"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; the task says its kind."""
        return {**to_plain(self), "task": {"kind": self.task.kind, **to_plain(self.task)}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`; what is unknown, missing or of another type is named."""
        from acutance.lab.tasks import config_class  # tasks build on this module

        if not isinstance(data, Mapping) or not isinstance(data.get("task"), Mapping):
            raise AcutanceError("a configuration is a mapping with a task in it")
        types = field_types(cls)
        parts: dict[str, Any] = {}
        for name, part in data.items():
            if name not in types:
                raise unknown_field("", name, list(types))
            if name != "task":
                parts[name] = from_plain(types[name], part, name)
        task = {name: value for name, value in data["task"].items() if name != "kind"}
        return cls(task=from_plain(config_class(str(data["task"].get("kind"))), task, "task"), **parts)
