"""A run's folder: the record of how it was made, and the paths of its files."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.lab.tasks import task_class
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.config import Config, incidental_fields
from acutance.lab.train.provenance import made

FORMAT = "acutance-run/1"
RESULT_FORMAT = "acutance-result/1"
LONGEST_NAME = 80  # characters for changed fields in the name of a folder or file


def _inside(name: str) -> Any:
    return property(lambda run: run.folder / name)


@dataclass(frozen=True)
class Run:
    """The folder of a run."""

    folder: Path

    record_path = _inside("run.json")  # how it was made
    checkpoints = _inside("checkpoints")  # to resume from
    best_path = _inside("best.safetensors")  # the best model so far, for `acutance.load`
    model_path = _inside("model.safetensors")  # the last model
    result_path = _inside("result.json")  # the scores of both; written when the run is finished
    lock_path = _inside(".lock")  # held by the command that trains here

    def how_to_go_on(self) -> str:
        return f"To go on: acutance train --out {self.folder} --resume"

    def exists(self) -> bool:
        return bool(self.record_path.exists())

    def begin(self, config: Config, recipe: str | None, processes: int, start: Mapping[str, Any] | None = None) -> None:
        """Record how the run is made and which weights it starts from, if any."""
        body = {"format": FORMAT, "recipe": recipe, "config": config.to_dict(), "start": start}
        _write_json(self.record_path, {**body, "sessions": [{**made("started"), "processes": processes}]})

    def go_on(self, config: Config, processes: int) -> None:
        """Add a session to the record, and update the configuration."""
        body = self.record()
        changed = changes(body["config"], config.to_dict())
        body["sessions"].append({**made("started"), "processes": processes, "changed": changed})
        _write_json(self.record_path, {**body, "config": config.to_dict()})

    def config(self) -> Config:
        if not self.exists():
            raise AcutanceError(f"there is no {self.record_path}: {self.folder} is no run")
        return read_json(self.record_path, FORMAT, lambda body: Config.from_dict(body["config"]))

    def record(self) -> dict[str, Any]:
        """The whole record: recipe, config, sessions and start (the initial weights)."""
        return read_json(self.record_path, FORMAT, dict)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the scores, which marks the run as finished."""
        _write_json(self.result_path, {"format": RESULT_FORMAT, **result})

    def result(self) -> dict[str, Any] | None:
        """The scores, or None if the run is not finished."""
        if not self.result_path.exists():
            return None
        return read_json(self.result_path, RESULT_FORMAT, lambda body: {k: v for k, v in body.items() if k != "format"})

    def described(self, result: Mapping[str, Any]) -> str:
        """A result in a sentence."""
        name, best, seen = result["headline"], result["best"], getattr(self.config().task, "train_on", None) == "all"
        score = "not finite" if result["scores"][name] is None else f"{result['scores'][name]:.4g}"
        where = "a slice that was trained on (task.train_on=all)" if seen else "the held-out slice"
        better = "" if best is None else f", best {best['score']:.4g} after step {best['step']}"
        test = f"; acutance evaluate {self.folder} scores it on the test set" if seen else ""
        done = f"{name} {score} on {where} after step {result['step']}{better}"
        return f"{done}; models and logs are in {self.folder}{test}"


def default_folder(recipe: str, plain: Config, config: Config) -> Path:
    """E.g. `runs/cifar100-neutreno-0.6-seed0`: the recipe, every field that differs from it, and the seed."""
    differing = differences(plain, config, {"loop.seed"})
    words = ",".join(_word(name, new) for name, (_, new) in differing.items())
    return Path("runs") / "-".join(filter(None, [recipe, in_a_name(words), f"seed{config.loop.seed}"]))


def in_a_name(words: str) -> str:
    """Words as part of a file name. If characters are replaced or cut off, a checksum keeps names distinct."""
    name = re.sub(r"[^\w.=,+-]+", "-", words)[:LONGEST_NAME]
    return name if name == words else f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def _word(name: str, value: Any) -> str:
    """A mitigation by itself, weights as field and file, any other field with its value."""
    field = name.rpartition(".")[2]
    if field == "mitigation" and value:
        return str(value).replace(":", "-")
    if field in STARTS and value:
        return f"{field}={Path(value).stem}"
    return f"{field}={','.join(map(str, value)) if isinstance(value, list) else value}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """The fields that differ, by dotted name, as [before, after]."""
    found: dict[str, list[Any]] = {}
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= changes(old, new, f"{prefix}{name}.")
        elif old != new:
            found[prefix + name] = [old, new]
    return found


def differences(before: Config, after: Config, free: Collection[str] = ()) -> dict[str, list[Any]]:
    """The fields that make it another run: `changes` without incidental and `free` fields."""
    ignored = {*incidental_fields(after), *free}
    found = changes(before.to_dict(), after.to_dict())
    return {name: pair for name, pair in found.items() if name not in ignored}


def config_without_incidentals(run: Run) -> dict[str, Any]:
    """A run's configuration without its seed, incidental fields and fields that only its test reads.

    Runs with the same one differ only in their seed, and the runs they start from may do so too.
    """
    config, start = run.config(), run.record().get("start")
    task = task_class(config.task.kind)
    tested = {f"task.{name}" for name in {*task.evaluated_by("test")} - {*task.evaluated_by("val")}}
    found = config.to_dict()
    for name in incidental_fields(config) | tested | {"loop.seed"}:
        *parents, last = name.split(".")
        del reduce(getitem, parents, found)[last]
    for name in STARTS:
        if found["task"].get(name) is not None and start is not None:  # without a record there is only the path
            trained, sha256 = start.get("trained"), f"sha256 {start['sha256'][:16]}"
            found["task"][name] = {"file": Path(start["file"]).name, **trained} if trained else sha256
    return found


def shown(value: Any) -> str:
    """A value in a message."""
    return "none" if value is None else str(value)


def listed(changed: Mapping[str, list[Any]]) -> str:
    """Changed fields in a message, e.g. `loop.seed 1 instead of 0`."""
    return ", ".join(f"{name} {shown(new)} instead of {shown(old)}" for name, (old, new) in changed.items())


def _write_json(path: Path, body: Any) -> None:
    atomic_write(path, json.dumps(body, indent=1, ensure_ascii=False).encode())
