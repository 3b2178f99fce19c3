"""Runs `acutance` commands in processes forked from one that has imported their modules: most take less time."""

import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = "acutance.__main__ acutance.io acutance.explain.read acutance.measure.reader acutance.lab.reproduce.run "
PRELOADED += "acutance.lab.train.loop lightning.fabric matplotlib.pyplot"
FORKS.set_forkserver_preload(PRELOADED.split())


def run_forked(*arguments, seconds=600, prepare=None, **environment):
    """Run `acutance` with these arguments in the current directory; it is killed after `seconds`."""
    (done,) = run_beside([(arguments, environment)], seconds, prepare)
    return done


def run_as_torchrun(first, second=None, *, machines=1, prepare=None, seconds=600, **environment):
    """Run two processes as torchrun would start them, on one machine or two, each with its own arguments.

    `prepare` is called in both, before the command. On a busy machine gloo's first connection sometimes fails before
    any work is done; then both are started once more.
    """
    for _ in range(2):
        port, local = free_port(), 2 // machines
        commands = []
        for rank, words in enumerate((first, first if second is None else second)):
            told = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local, "WORLD_SIZE": 2}
            told |= {"LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": machines, "OMP_NUM_THREADS": 1}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
            told |= {"TORCHELASTIC_USE_AGENT_STORE": False, "TORCHELASTIC_RESTART_COUNT": 0}
            commands.append((words, {name: str(value) for name, value in told.items()} | environment))
        done = run_beside(commands, seconds, prepare)
        if not any("DistNetworkError" in one.stderr for one in done):
            break
    return done


def free_port():
    """A free port below the ephemeral ones, which the system might give to another program before it is used."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def run_beside(commands, seconds=600, prepare=None):
    """Run commands (arguments and environment) at once. One not done in time is killed, and says where it was."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for place, (arguments, environment) in enumerate(commands):
            streams = [Path(folder, f"{place} {name}") for name in ("output", "errors")]
            words = [str(argument) for argument in arguments]
            process = FORKS.Process(target=_command, args=(words, Path.cwd(), environment, streams, prepare))
            process.start()
            started.append((words, process, streams))
        end, finished = time.monotonic() + seconds, []
        for words, process, streams in started:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGABRT)
                process.join()
            printed = [stream.read_text(encoding="utf-8") if stream.exists() else "" for stream in streams]
            finished.append(subprocess.CompletedProcess(["acutance", *words], process.exitcode, *printed))
        return finished


def _command(arguments, directory, environment, streams, prepare):
    from acutance.__main__ import run

    os.chdir(directory)
    os.environ.update(environment)
    faulthandler.enable()
    for stream, path in zip((sys.stdout, sys.stderr), streams, strict=True):
        with path.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), stream.fileno())
    if prepare is not None:
        prepare()
    sys.argv = ["acutance", *arguments]
    run()
