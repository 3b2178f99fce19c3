"""When, by which command, with what, on what and from which sources something was made."""

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
# Beside src/: what a copy of the sources without their history is compared with.
STAMP = SOURCES.parents[1] / "provenance.json"


def made(when: str) -> dict[str, Any]:
    """All of it; `when` is what the time is called."""
    now, program = datetime.now(UTC).isoformat(timespec="seconds"), Path(sys.argv[0])
    typed = "acutance" if program.parts[-2:] == ("acutance", "__main__.py") else program.name  # by python -m
    command = [typed, *sys.argv[1:]]
    return {when: now, "command": command, "versions": versions(), "hardware": hardware(), "git": git_state()}


def versions() -> dict[str, str]:
    """Of everything that influences the numbers."""
    found = {"acutance": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    """What it ran on, without naming the machine."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def git_state() -> dict[str, Any] | None:
    """The commit of the sources and whether they were changed since, by git or else by the stamp; None without both."""
    root = _git("rev-parse", "--show-toplevel") if shutil.which("git") else None
    if root is not None and Path(root) / "src" / "acutance" == SOURCES:  # not of a repository that it is installed in
        return {"commit": _git("rev-parse", "HEAD"), "changed": bool(_git("status", "--porcelain", "--", "."))}
    if SOURCES.parent.name != "src" or not STAMP.is_file():
        return None
    stamp: dict[str, Any] = read_json(STAMP, FORMAT, dict)
    return {"commit": stamp["commit"], "changed": stamp["sources"] != sources_digest()}


def clean_commit() -> str:
    """The commit of sources that were not changed; anything else is refused."""
    state = git_state()
    if state is None:
        advice = "where the history is, `acutance reproduce --stamp` writes it into provenance.json; take that along"
        raise AcutanceError(f"nothing says which commit {SOURCES} is: {advice}")
    if state["changed"]:
        raise AcutanceError(
            f"{SOURCES} is not what its commit {state['commit'][:12]} says: commit the changes, and write the stamp "
            "anew (acutance reproduce --stamp)"
        )
    return str(state["commit"])


def write_stamp() -> Path:
    """Write commit and digest of the sources beside src/, for a copy without the history."""
    body = {"format": FORMAT, "commit": clean_commit(), "sources": sources_digest()}
    return atomic_write(STAMP, json.dumps(body, indent=1).encode() + b"\n")


def sources_digest(folder: Path = SOURCES) -> str:
    """A SHA-256 over names and contents of all files, without what Python compiled."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=SOURCES, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
