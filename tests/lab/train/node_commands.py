"""What torchrun starts in test_train_nodes: the command line, in float64, that loses its machine in a step.

Arguments: the folder whose changes are told, the step (or none), and those of acutance.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from test_train_processes import use_float64

from acutance import cli
from acutance.lab.train.loop import Loop

WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


def lose_machine_in(step):
    """As when it burns: the agent of torchrun and the process it started, at once."""
    real = Loop._step

    def dying(self, now, parts):
        if now == step:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, now, parts)

    Loop._step = dying


def tell_of_writing_in(folder):
    def hook(event, arguments):
        writes = event in WRITES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes and str(arguments[0]).startswith(str(folder)):
            print(f"process {os.environ['RANK']} wrote: {event} {Path(arguments[0]).name}", flush=True)

    sys.addaudithook(hook)


def prepare(folder):
    """Before a command, in a process of its own."""
    torch.set_num_threads(1)
    use_float64(pytest.MonkeyPatch())
    tell_of_writing_in(folder)


if __name__ == "__main__":
    _, folder, step, *command = sys.argv
    prepare(folder)
    if step != "none":
        lose_machine_in(int(step))
    sys.argv = ["acutance", *command]
    cli.run()
