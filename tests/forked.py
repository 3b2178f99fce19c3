"""`acutance` commands, each a process of its own, forked from one that has imported what they import.

Importing takes longer than most commands do.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["acutance.cli", "acutance.reproduce.session", "acutance.train.loop", "lightning.fabric", "matplotlib.pyplot"]
)


def run_forked(*arguments: object, seconds: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `acutance` gives for these arguments in the current directory; killed after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("output", "errors")]
        words = [str(argument) for argument in arguments]
        process = FORKS.Process(target=_command, args=(words, Path.cwd(), environment, streams))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        printed = [stream.read_text(encoding="utf-8") if stream.exists() else "" for stream in streams]
        assert process.exitcode is not None
        return subprocess.CompletedProcess(["acutance", *words], process.exitcode, *printed)


def _command(arguments: list[str], directory: Path, environment: dict[str, str], streams: list[Path]) -> None:
    from acutance.cli import run

    os.chdir(directory)
    os.environ.update(environment)
    for stream, path in zip((sys.stdout, sys.stderr), streams, strict=True):
        with path.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["acutance", *arguments]
    run()
