"""The configuration of a run, as plain data: saved with the run, rebuilt from it, and changed field by field."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from acutance.errors import AcutanceError
from acutance.lab.tasks import config_class
from acutance.lab.tasks.base import check_ranges, incidental


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser. Biases, norms, position and class embeddings and mitigations get no weight decay."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    lr: float = 1e-3  # the peak, for the whole batch; recipes say how it was scaled
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9  # Nesterov's, of sgd and muon
    clip: float | None = None  # the largest gradient norm; None never clips

    def __post_init__(self) -> None:
        names = {"0 or more": "lr weight_decay eps", "at least 0 and less than 1": "betas momentum"}
        check_ranges("optim", self, names | {"more than 0": "clip"})


# Fields that an optimiser does not read. Changing one is refused.
UNREAD = {"adamw": ("momentum",), "adam": ("momentum",), "sgd": ("betas", "eps"), "muon": ()}


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate: a linear warm-up, then a curve that ends at `final`."""

    name: Literal["cosine", "poly", "constant"] = "cosine"
    warmup: float = 0.0  # in epochs
    start: float = 0.0  # the learning rate at which the warm-up begins
    final: float = 0.0
    power: float = 0.9  # of poly
    per: Literal["step", "epoch"] = "step"  # how often it changes; DeiT's changes once an epoch
    warmup_inside: bool = False  # the curve starts at step 0, hidden by the warm-up (DeiT), not after the warm-up

    def __post_init__(self) -> None:
        check_ranges("schedule", self, {"0 or more": "warmup start final"})


@dataclass(frozen=True)
class LoopConfig:
    """How long the loop runs, in which precision, and on which processes."""

    epochs: float = 10
    batch_size: int = 128  # over all processes and accumulated parts
    accumulate: int = incidental(1)  # parts of a batch whose gradients are added before a step
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = incidental(False)
    compile_blocks: bool = incidental(False)  # compile each block by itself, if a deep model compiles too long
    graph: bool = incidental(False)  # capture the step as one CUDA graph; only with one process and accumulate=1
    deterministic: bool = incidental(False)
    strategy: Literal["auto", "single", "ddp", "fsdp"] = incidental("auto")  # auto: ddp under torchrun, else single
    ema: float | None = None  # decay of the running mean of the weights; None: no mean
    checkpoint_every: int = incidental(500)  # steps
    keep_last: int = incidental(2)  # checkpoints
    evaluate_every: float = incidental(1)  # epochs; the last one is always evaluated
    log_every: int = incidental(50)  # steps
    monitor_every: int | None = incidental(None)  # steps between measurements of smoothness; None: no measurements

    def __post_init__(self) -> None:
        counts = "batch_size accumulate checkpoint_every keep_last log_every monitor_every"
        names = {"more than 0": "epochs evaluate_every", "1 or more": counts, "at least 0 and less than 1": "ema"}
        check_ranges("loop", self, names)
        if self.batch_size % self.accumulate:
            raise AcutanceError(
                f"a batch of {self.batch_size} cannot be cut into {self.accumulate} equal parts: choose "
                "loop.accumulate so that it divides loop.batch_size"
            )


@dataclass(frozen=True)
class Config:
    """A whole run. `task` is one of the dataclasses in `acutance.lab.tasks`; its `kind` names it on disk."""

    task: Any
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, with the task's kind."""
        plain = json.loads(json.dumps(asdict(self)))
        return {**plain, "task": {"kind": self.task.kind, **plain["task"]}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Errors name fields that are unknown, missing or of the wrong type."""
        if not isinstance(data, Mapping) or not isinstance(data.get("task"), Mapping):
            raise AcutanceError("a configuration is a mapping with a task in it")
        task = {name: value for name, value in data["task"].items() if name != "kind"}
        built = from_dict(config_class(str(data["task"].get("kind"))), task, "task")
        return cast(Self, from_dict(cls, {**data, "task": built}))


def override(config: Config, assignments: Iterable[str]) -> Config:
    """The configuration with these fields replaced, all at once. If a field comes twice, the last value counts.

    Assignments are `name.of.field=value`, with the value as in JSON; text needs no quotes.
    """
    data = config.to_dict()
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise AcutanceError(f"--set takes name=value, such as optim.lr=1e-3, not {assignment!r}")
        *parents, last = (part.strip() for part in name.split("."))
        if not parents and last not in data and (elsewhere := list(_paths_to(last, data))):
            raise _unknown_field("", last, list(data), elsewhere)
        inside, done = data, ""
        for parent in parents:
            inside, done = inside.setdefault(parent, {}), f"{done}.{parent}".lstrip(".")
            if not isinstance(inside, dict):
                raise AcutanceError(f"{done} has no fields of its own, so there is no {name}")
        inside[last] = json.loads(text) if text.startswith("{") else _Text(text)
    if isinstance(data["task"], dict):
        data["task"].setdefault("kind", config.task.kind)
    changed = Config.from_dict(data)
    for name in UNREAD[changed.optim.name]:
        if getattr(changed.optim, name) != getattr(config.optim, name):
            raise AcutanceError(f"optim.{name} is not read by {changed.optim.name} (optim.name): leave it as it was")
    return changed


def incidental_fields(config: Any, prefix: str = "") -> set[str]:
    """The dotted names of the fields made by `incidental`."""
    found = {prefix + one.name for one in fields(config) if one.metadata.get("incidental")}
    inside = {one.name: value for one in fields(config) if is_dataclass(value := getattr(config, one.name))}
    return found.union(*(incidental_fields(value, f"{prefix}{name}.") for name, value in inside.items()))


class _Text(str):
    """A value as it was typed. The field's type decides how to read it."""

    def parsed(self) -> Any:
        try:
            return json.loads(self)
        except ValueError:
            return {"none": None, "true": True, "false": False}.get(self.lower(), str(self))


def _paths_to(name: str, data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if key == name:
            yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths_to(name, value, f"{prefix}{key}.")


def from_dict(kind: Any, value: Any, where: str = "") -> Any:
    """A value of this annotated type, made from plain data. Errors name the field that does not fit."""
    if isinstance(value, _Text):
        value = str(value) if kind is str else value.parsed()
    whole, origin, arguments = kind, get_origin(kind), get_args(kind)
    if kind is Any or (value is None and NoneType in arguments):
        return value
    if origin in (Union, UnionType):
        (kind,) = (choice for choice in arguments if choice is not NoneType)
        origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_from(kind, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            entries = enumerate(zip(kinds, value, strict=True))
            return tuple(from_dict(one, entry, f"{where}[{index}]") for index, (one, entry) in entries)
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    raise _misfit(whole, value, where)


def _dataclass_from(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value
    types, names = get_type_hints(kind), [one.name for one in fields(kind)]
    if not isinstance(value, Mapping):
        raise AcutanceError(f"{where} has fields of its own ({', '.join(names)}): set these, not {where}")
    if unknown := [name for name in value if name not in names]:
        raise _unknown_field(where, unknown[0], names)
    required = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in required if name not in value]:
        raise AcutanceError(f"{where or kind.__name__} lacks {', '.join(missing)}")
    dotted = f"{where}." if where else ""
    return kind(**{name: from_dict(types[name], entry, dotted + name) for name, entry in value.items()})


def _unknown_field(where: str, name: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> AcutanceError:
    place = f"{where} has no field" if where else "there is no field"
    meant = f", did you mean {' or '.join(elsewhere)}?" if elsewhere else hint(name, known)
    return AcutanceError(f"{place} {name!r}{meant}; known: {', '.join(known)}")


def _misfit(kind: Any, value: Any, where: str) -> AcutanceError:
    meant = hint(value, get_args(kind)) if get_origin(kind) is Literal else ""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return AcutanceError(f"{where} is {_described(kind)}, not {shown}{meant}")


def _described(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_described, arguments))
    if origin is tuple:
        return f"a list{'' if arguments[-1] is Ellipsis else f' of {len(arguments)}'}, each {_described(arguments[0])}"
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def hint(name: object, known: Iterable[object]) -> str:
    """For an error message: the name that was probably meant, if one is close."""
    close = get_close_matches(str(name), [str(one) for one in known], n=1)
    return f", did you mean {close[0]}?" if close else ""
