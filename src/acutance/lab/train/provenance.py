"""How a result was made: the time, command, versions, hardware and commit."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import acutance
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.version import __version__

PACKAGES = ("lightning", "numpy", "safetensors", "tensorboard", "pillow", "scikit-learn", "triton")
FORMAT = "acutance-provenance/1"
SOURCES = Path(acutance.__file__).parent
# Beside src/: commit and digest, with which a copy of the sources without the git history is compared.
STAMP = SOURCES.parents[1] / "provenance.json"


def made(when: str) -> dict[str, Any]:
    """All of it; `when` is the name of the time."""
    now, program = datetime.now(UTC).isoformat(timespec="seconds"), Path(sys.argv[0])
    typed = "acutance" if program.parts[-2:] == ("acutance", "__main__.py") else program.name  # by python -m
    command = [typed, *sys.argv[1:]]
    return {when: now, "command": command, "versions": versions(), "hardware": hardware(), "git": git_state()}


def versions() -> dict[str, str]:
    """The versions of everything that influences the numbers."""
    found = {"acutance": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    """The hardware, without the machine's name."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def git_state() -> dict[str, Any] | None:
    """The commit of the sources and whether they have changed since: from git, else from the stamp, else None."""
    root = _git("rev-parse", "--show-toplevel") if shutil.which("git") else None
    if root is not None and Path(root) / "src" / "acutance" == SOURCES:  # not another repository around it
        return {"commit": _git("rev-parse", "HEAD"), "changed": bool(_git("status", "--porcelain", "--", "."))}
    if SOURCES.parent.name != "src" or not STAMP.is_file():
        return None
    stamp: dict[str, Any] = read_json(STAMP, FORMAT, dict)
    return {"commit": stamp["commit"], "changed": stamp["sources"] != sources_digest()}


def clean_commit() -> str:
    """The commit of the sources. Refused if it is unknown or the sources have changed since."""
    state = git_state()
    if state is None:
        advice = "run `acutance reproduce --stamp` where the git history is, and copy provenance.json along"
        raise AcutanceError(f"nothing says which commit {SOURCES} is: {advice}")
    if state["changed"]:
        raise AcutanceError(
            f"{SOURCES} is not what its commit {state['commit'][:12]} says: commit the changes, and write the stamp "
            "again (acutance reproduce --stamp)"
        )
    return str(state["commit"])


def write_stamp() -> Path:
    """Write commit and digest of the sources beside src/, for a copy without the history."""
    body = {"format": FORMAT, "commit": clean_commit(), "sources": sources_digest()}
    return atomic_write(STAMP, json.dumps(body, indent=1).encode() + b"\n")


def sources_digest(folder: Path = SOURCES) -> str:
    """A SHA-256 over the names and contents of all files, without Python's caches."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=SOURCES, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
