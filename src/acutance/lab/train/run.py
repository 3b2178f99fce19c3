"""A run's folder: what it was made of, and where everything in it lies."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.config import Config
from acutance.version import __version__

FORMAT = "acutance-run/1"
RESULT_FORMAT = "acutance-result/1"
# Fields that say where, how fast or how often, but not what comes out.
INCIDENTAL = frozenset({
    "loop.seed", "loop.strategy", "loop.graph", "loop.checkpoint_every", "loop.keep_last", "loop.log_every",
    "loop.monitor_every", "task.data_dir", "task.workers", "task.compile_augment",
})  # fmt: skip
LONGEST_NAME = 80  # of what a folder's or a file's name says of changed fields
PACKAGES = ("lightning", "numpy", "safetensors", "tensorboard", "pillow", "scikit-learn", "triton")


@dataclass(frozen=True)
class Run:
    """The folder of a run.

    `run.json` says what it is made of, `log.jsonl` and `tensorboard/` how it went, `checkpoints/` hold what it goes on
    from, `best.safetensors` is its best model, `model.safetensors` its last one; `result.json` says how good both are.
    """

    folder: Path

    @property
    def record_path(self) -> Path:
        """What the run is made of."""
        return self.folder / "run.json"

    @property
    def result_path(self) -> Path:
        """Written when it is finished."""
        return self.folder / "result.json"

    @property
    def model_path(self) -> Path:
        """The last model, for `acutance.load`."""
        return self.folder / "model.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def lock_path(self) -> Path:
        """Held by the command that trains here."""
        return self.folder / ".lock"

    @property
    def best_path(self) -> Path:
        """The best model so far, for `acutance.load`."""
        return self.folder / "best.safetensors"

    def how_to_go_on(self) -> str:
        """The command that does."""
        return f"To go on: acutance train --out {self.folder} --resume"

    def exists(self) -> bool:
        """Whether something was begun here."""
        return self.record_path.exists()

    def names_format(self) -> bool:
        """Whether the record names its format; one that cannot be read at all is for `config` to refuse."""
        try:
            return "format" in json.loads(self.record_path.read_text(encoding="utf-8"))
        except ValueError:
            return True

    def leave_mark(self) -> str:
        """Put a file there by which other processes know the folder; gives its name, which was never used before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f".seen-{uuid4().hex}"
        (self.folder / name).touch()
        return name

    def find_mark(self, name: str) -> None:
        """Refuse a folder without it, which is another one of the same name."""
        if not (self.folder / name).exists():
            raise AcutanceError(
                f"{self.folder.absolute()} is not the folder that the first process writes to: all machines need the "
                "same one, on a file system that they share. Name it with --out"
            )

    def remove_mark(self, name: str) -> None:
        """Leave the folder as it was, or none if it is empty."""
        (self.folder / name).unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def begin(self, config: Config, recipe: str | None, processes: int, start: Mapping[str, Any] | None = None) -> None:
        """Write down what the run is made of, and which weights it starts from, if any."""
        body = {"format": FORMAT, "recipe": recipe, "config": config.to_dict(), "start": start}
        atomic_write(self.record_path, _json({**body, "sessions": [session(processes)]}))

    def go_on(self, config: Config, processes: int) -> None:
        """Add a session to the record, and the configuration in case it was changed."""
        body = read_json(self.record_path, FORMAT, dict)
        added = {**session(processes), "changed": changes(body["config"], config.to_dict())}
        body["sessions"] = [*body["sessions"], added]
        atomic_write(self.record_path, _json({**body, "config": config.to_dict()}))

    def config(self) -> Config:
        """What the run is made of."""
        if not self.exists():
            raise AcutanceError(f"there is no {self.record_path}: {self.folder} is no run")
        return read_json(self.record_path, FORMAT, lambda body: Config.from_dict(body["config"]))

    def recipe(self) -> str | None:
        """The recipe it was started with."""
        name: str | None = read_json(self.record_path, FORMAT, lambda body: body["recipe"])
        return name

    def start(self) -> dict[str, Any] | None:
        """What is recorded of the weights it started from, if it did."""
        found: dict[str, Any] | None = read_json(self.record_path, FORMAT, lambda body: body.get("start"))
        return found

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write how good it became: the sign that it is finished."""
        atomic_write(self.result_path, _json({"format": RESULT_FORMAT, **result}))

    def result(self) -> dict[str, Any] | None:
        """How good it became, or None if it is not finished."""
        if not self.result_path.exists():
            return None
        return read_json(self.result_path, RESULT_FORMAT, lambda body: {k: v for k, v in body.items() if k != "format"})


def default_folder(recipe: str, plain: Config, config: Config) -> Path:
    """`runs/cifar100-neutreno-0.6-seed0`: the recipe, every field in which the run differs from it, and the seed.

    Args:
        recipe: its name.
        plain: its configuration.
        config: the run's.
    """
    differing = changes(plain.to_dict(), config.to_dict())
    words = ",".join(_word(name, new) for name, (_, new) in differing.items() if name not in INCIDENTAL)
    return Path("runs") / "-".join(filter(None, [recipe, in_a_name(words), f"seed{config.loop.seed}"]))


def in_a_name(words: str) -> str:
    """Words as part of a file's name. Where signs are replaced or the end is cut off, a checksum tells them apart."""
    name = re.sub(r"[^\w.=,+-]+", "-", words)[:LONGEST_NAME]
    return name if name == words else f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def _word(name: str, value: Any) -> str:
    """A mitigation by itself, of weights the file, all else with the field's name."""
    field = name.rpartition(".")[2]
    if field == "mitigation" and value:
        return str(value).replace(":", "-")
    if field in STARTS and value:
        return f"{field}={Path(value).stem}"
    return f"{field}={','.join(map(str, value)) if isinstance(value, list) else value}"


def session(processes: int) -> dict[str, Any]:
    """When, with what and on what a run was started or went on."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "versions": versions(),
        "hardware": hardware(),
        "processes": processes,
        "git": git_state(),
    }


def command_line() -> list[str]:
    """What was typed; `python -m acutance` is `acutance`."""
    program = Path(sys.argv[0])
    name = "acutance" if program.parts[-2:] == ("acutance", "__main__.py") else program.name
    return [name, *sys.argv[1:]]


def versions() -> dict[str, str]:
    """Of everything that has a hand in the numbers."""
    own = {"acutance": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return own | {name: found for name in PACKAGES if (found := _version_of(name))}


def hardware() -> dict[str, Any]:
    """What it ran on, without naming the machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def git_state() -> dict[str, Any] | None:
    """The commit of the sources and whether they were changed since; None for an installed package."""
    here = Path(__file__).parent
    root = _git(here, "rev-parse", "--show-toplevel") if shutil.which("git") else None
    if root is None or Path(root) / "src" / "acutance" != here.parent:
        return None  # a package installed below some other repository is not of it
    return {"commit": _git(here, "rev-parse", "HEAD"), "changed": bool(_git(here, "status", "--porcelain"))}


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


def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _json(body: Any) -> bytes:
    return json.dumps(body, indent=1, ensure_ascii=False).encode()
