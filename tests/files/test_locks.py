"""A lock is one process's, and goes with it."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from acutance.errors import AcutanceWarning
from acutance.files import locks

OURS = """
import sys
from pathlib import Path
from acutance.files.locks import held
with held(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""
PLAIN = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(True, flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(path, program=PLAIN):
    """One that holds the lock until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_another_process_holds_it_until_it_ends(tmp_path):
    path = tmp_path / "new" / ".lock"
    with another_process(path, OURS) as process:
        with locks.held(path) as mine:
            assert not mine
        assert locks.holder(path).endswith(f", process {process.pid}")
        process.communicate("")
        with locks.held(path) as mine:
            assert mine


def test_a_killed_process_holds_nothing(tmp_path):
    path = tmp_path / ".lock"
    with another_process(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locks.held(path) as mine:
            assert mine


def test_it_is_let_go_of_after_an_error_too(tmp_path):
    path = tmp_path / ".lock"
    with pytest.raises(ZeroDivisionError), locks.held(path):
        raise ZeroDivisionError
    with locks.held(path) as mine, locks.held(path) as again:
        assert mine
        assert not again


def test_a_child_that_inherits_the_file_holds_nothing(tmp_path):
    path = tmp_path / ".lock"
    with locks.held(path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with locks.held(path) as mine:
            assert mine
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(AcutanceWarning, match="without locks"), locks.held(tmp_path / ".lock") as mine:
        assert mine


def test_nobody_known(tmp_path):
    assert locks.holder(tmp_path / "none") == "another process"
