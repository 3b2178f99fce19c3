"""Results: one line of JSON for each run. Lines are only appended. A run with a line is done."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

from acutance.errors import AcutanceError
from acutance.files.atomic import append_line, read_lines
from acutance.lab import locks
from acutance.lab.files import finite
from acutance.lab.queue.jobs import Job

FORMAT = "acutance-queue-result/1"
WAIT = 60.0  # seconds for another process to append its line
# A run beside w − 1 others on one GPU takes ALONE + BESIDE · w times as long as alone: 2.5 times with four.
ALONE, BESIDE = 0.5, 0.5


@dataclass(frozen=True)
class Results:
    """The file of results."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """Results by key. If a key comes twice after a merge, the first counts."""
        if not self.path.is_file():
            return {}
        found: dict[str, dict[str, Any]] = {}
        for key, body in read_lines(self.path, FORMAT, lambda body: (body["key"], body)):
            found.setdefault(key, body)
        return found

    def append(self, job: Job, record: Mapping[str, Any]) -> None:
        """Add a line, whole or not at all. A second line for the same job is refused."""
        body = {"format": FORMAT, "key": job.key, "kind": job.block.kind, "label": job.label, "seed": job.seed}
        line = finite({**body, "definition": job.definition, **record})
        start, lock = monotonic(), self.path.with_name(f".{self.path.name}.lock")
        while True:
            with locks.held(lock) as mine:
                if mine:
                    if job.key in self.read():
                        raise AcutanceError(f"{self.path} has a result of {job.label} already")
                    append_line(self.path, line)
                    return
            if monotonic() - start > WAIT:
                raise AcutanceError(f"{self.path} is held by {locks.holder(lock)}: start again, and the run is found")
            sleep(0.05)


def expected_seconds(job: Job, results: Mapping[str, Mapping[str, Any]], workers: int, machine: str) -> float:
    """How long a job takes beside workers − 1 others, by earlier runs of its configuration or else by the file."""
    alone = job.seconds
    same = {name: value for name, value in job.definition.items() if name != "loop.seed"}
    found = [
        line["seconds"] / beside(line["workers"])
        for line in results.values()
        if line.get("machine") == machine and line.get("sessions") == 1
        if {name: value for name, value in line["definition"].items() if name != "loop.seed"} == same
    ]
    return (median(found) if found else alone) * beside(workers)


def beside(workers: int) -> float:
    """How many times longer a run takes beside workers − 1 others than alone."""
    return ALONE + BESIDE * workers
