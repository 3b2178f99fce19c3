import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from acutance.errors import AcutanceError, AcutanceWarning
from acutance.files.atomic import atomic_write
from acutance.lab import locks
from acutance.lab.files import finite
from acutance.measure.monitor import History
from acutance.measure.profile import Profile


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interruption_keeps_the_old_file_and_leaves_nothing_else(tmp_path, interruption) -> None:
    path = atomic_write(tmp_path / "new" / "b.txt", b"old")

    def half(temporary) -> None:
        temporary.write_bytes(b"ne")
        raise interruption

    with pytest.raises(interruption):
        atomic_write(path, half)
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_nan_becomes_null_wherever_it_stands() -> None:
    found = finite({"a": float("nan"), "b": [1.5, {"c": float("nan")}], "d": "nan"})
    assert found == {"a": None, "b": [1.5, {"c": None}], "d": "nan"}


@pytest.mark.parametrize("load", [Profile.load, History.load])
def test_files_that_cannot_be_read_are_errors_of_ours(tmp_path, load) -> None:
    for kind in (AcutanceError, FileNotFoundError):
        with pytest.raises(kind, match=r"there is no file .*none\.json"):
            load(tmp_path / "none.json")
    with pytest.raises(AcutanceError, match="cannot be read: Is a directory"):
        load(tmp_path)


HOLD = """
import sys
from pathlib import Path
from acutance.lab.locks import held
with held(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, None])
def test_another_process_holds_it_until_it_ends(tmp_path, ending):
    path = tmp_path / "new" / ".lock"
    assert locks.holder(path) == "another process"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with locks.held(path) as mine:
            assert not mine
        assert locks.holder(path).endswith(f", process {process.pid}")
        process.send_signal(ending) if ending else process.communicate("")
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
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(37, "No locks available")))
    with pytest.warns(AcutanceWarning, match="without locks"), locks.held(tmp_path / ".lock") as mine:
        assert mine
