"""Plant faults in a copy of the source, one at a time, and see whether the tests notice.

A fault is a record in a TOML file beside this one; the file's name is its room. It replaces `old` by `new` in one file
of src/acutance, where `old` must stand exactly once. At least one of its `tests`, run alone, must fail then. An error
before the tests (an import that breaks) is no catch, and neither is a test that is red without the fault.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".triton"
AT_A_TIME = 2
SECONDS = 300  # a fault may make a test wait for ever
OWN = threading.local()


@dataclass(frozen=True)
class Fault:
    """One mistake that a change of the code could make."""

    room: str
    name: str
    does: str  # what is wrong then, in one sentence
    file: str  # below src/acutance
    old: str
    new: str
    tests: tuple[str, ...]  # files or node ids, of which one must fail
    triton: bool = False  # whether the tests run Triton's interpreter

    def planted(self, text: str) -> str:
        """The source with the fault in it."""
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"rewrite this patch: the old text stands {count} times in src/acutance/{self.file}")
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """All records, room by room."""
    rooms = {file.stem: tomllib.loads(file.read_text("utf-8")) for file in sorted(Path(__file__).parent.glob("*.toml"))}
    return [
        Fault(room, **entry | {"tests": tuple(entry["tests"])})
        for room, body in rooms.items()
        for entry in body["fault"]
    ]


def run_tests(source: Path, tests: Sequence[str], *options: str, triton: bool, limit: int | None) -> tuple[int, str]:
    """Exit status and output of pytest with the given source; −1 where it took longer than the limit in seconds."""
    path = [str(source), str(TRITON)] if triton else [str(source)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({"TRITON_INTERPRET": "1"} if triton else {})
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", *options, *tests]
    with tempfile.TemporaryFile("w+") as output:  # no pipe, which a test's own processes could keep open
        try:
            told = {"cwd": ROOT, "env": environment, "stdout": output, "stderr": subprocess.STDOUT, "timeout": limit}
            status = subprocess.run(command, check=False, **told).returncode
        except subprocess.TimeoutExpired:
            status = -1
        output.seek(0)
        return status, output.read()


def failures(output: str) -> list[str]:
    """The tests that failed, by node id."""
    return re.findall(r"^FAILED (.+?)(?: - .*)?$", output, re.MULTILINE)


def red_tests(source: Path, faults: Sequence[Fault], triton: bool) -> str:
    """What is wrong with the named tests without any fault; empty if nothing is."""
    tests = sorted({test for fault in faults if fault.triton == triton for test in fault.tests})
    status, output = run_tests(source, tests, triton=triton, limit=None) if tests else (0, "")
    return "" if status == 0 else f"exit status {status}: {', '.join(failures(output)) or output[-2000:]}"


def own_copy(folder: Path) -> None:
    """Give this thread a source of its own to plant faults in."""
    OWN.source = Path(tempfile.mkdtemp(dir=folder), "src")
    shutil.copytree(ROOT / "src", OWN.source, ignore=shutil.ignore_patterns("__pycache__"))


def try_fault(fault: Fault) -> bool:
    """Whether the fault was caught; prints by what."""
    begun, file = time.monotonic(), OWN.source / "acutance" / fault.file
    whole, caught = file.read_text("utf-8") if file.is_file() else "", False
    try:
        file.write_text(fault.planted(whole), "utf-8")
    except ValueError as error:
        what = str(error)
    else:
        status, output = run_tests(OWN.source, fault.tests, "-x", triton=fault.triton, limit=SECONDS)
        file.write_text(whole, "utf-8")
        caught = status == 1 and bool(failures(output))
        what = f"caught by {failures(output)[0]}" if caught else f"NOT CAUGHT, exit status {status}: {output[-1500:]}"
    print(f"{'ok' if caught else 'FAIL':4} {fault.room}/{fault.name}: {what}, {time.monotonic() - begun:.0f} s")
    return caught


def main() -> int | str:
    parser = argparse.ArgumentParser(description="Plant faults one at a time and see whether the tests notice.")
    parser.add_argument("--only", metavar="NAME", action="append", help="this fault; may be given several times")
    parser.add_argument("--room", action="append", help="the faults of this room; may be given several times")
    asked = parser.parse_args()
    chosen = [f for f in read_faults() if f.room in (asked.room or [f.room]) and f.name in (asked.only or [f.name])]
    faults = [fault for fault in chosen if TRITON.is_dir() or not fault.triton]
    if not faults:
        return f"none of {len(chosen)} faults can be tried"
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_A_TIME, "", own_copy, (Path(folder),)) as pool:
        red = [pool.submit(red_tests, ROOT / "src", faults, triton) for triton in (False, True)]
        outcomes = list(pool.map(try_fault, faults))
        complaints = [found for job in red if (found := job.result())]
    for complaint in complaints:
        print(f"FAIL tests that are red without a fault catch nothing: {complaint}")
    skipped = f", {len(chosen) - len(faults)} skipped for want of Triton" if len(faults) < len(chosen) else ""
    print(f"{sum(outcomes)} of {len(faults)} faults caught in {time.monotonic() - begun:.0f} s{skipped}")
    return 0 if all(outcomes) and not complaints else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
