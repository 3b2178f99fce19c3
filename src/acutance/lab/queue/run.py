"""Running a queue: start the jobs that fit the remaining time, several at once, each in its own process."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from acutance.errors import AcutanceError
from acutance.lab import locks
from acutance.lab.evaluate.evaluate import with_data_dir
from acutance.lab.queue.jobs import Job, Queue
from acutance.lab.queue.record import keep_weights, record
from acutance.lab.queue.results import Results, expected_seconds
from acutance.lab.train.log import DivergedError
from acutance.lab.train.provenance import clean_commit, made
from acutance.lab.train.run import Run
from acutance.lab.train.start import train

UNITS = {"s": 1, "m": 60, "h": 3600}
GRACE = 30.0  # seconds for a stopped run to save itself
FAILURES = 3  # after this many without a success, nothing more is started
LOG_LINES = 12  # of a run that failed
BEGAN = "ACUTANCE_JOB_BEGAN"  # tells a job when its process was started, since importing torch takes a while


def duration(text: str) -> float:
    """Seconds of `9m`, `540s` or `1.5h`."""
    if (found := re.fullmatch(r"([\d.]+)([smh])", text)) is None:
        raise AcutanceError(f"a time is written 9m, 540s or 1.5h, not {text!r}")
    return float(found[1]) * UNITS[found[2]]


def machine_name() -> str:
    """The name of the machine; times are only compared on machines of one name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


@dataclass(frozen=True)
class Session:
    """One call of the queue: its files, and how the work is done."""

    file: Path
    out: Path  # runs and their logs, which may be lost
    results: Results
    workers: int = 1
    data_dir: Path | None = None
    device: str = "auto"
    trial: bool = False  # accept uncommitted sources, since nothing is published

    @property
    def queue(self) -> Queue:
        return Queue.load(self.file)

    def log(self, job: Job) -> Path:
        return self.out / f"{job.key}.log"

    def lock(self, job: Job) -> Path:
        return self.out / f".{job.key}.lock"

    def run_one(self, key: str, console: Console) -> None:
        """Train what is left of a job, measure its record and append it to the results."""
        job, began = self.queue.job(key), float(os.environ.get(BEGAN, time.time()))
        if not self.trial:
            clean_commit()
        with locks.held(self.lock(job)) as mine:
            if not mine:
                raise AcutanceError(f"{job.label} is being run by {locks.holder(self.lock(job))}")
            if job.key in self.results.read():
                return
            run = Run(self.out / job.key)
            config = with_data_dir(job.config, self.data_dir)
            how: dict[str, Any] = {"recipe": job.block.recipe, "resume": run.exists(), "device": self.device}
            try:
                train(config, run.folder, console=console, **how)
                found = record(job, run.folder, self.out, data_dir=self.data_dir, device=self.device)
                if job.row.keep and job.seed == job.block.seeds[0]:
                    keep_weights(job, run, self.out / "kept")
            except DivergedError as error:
                found = {"diverged": str(error).partition(". ")[0]}
            about = {name: value for name, value in made("finished").items() if name != "command"}
            about |= {"machine": machine_name(), "workers": self.workers, "sessions": len(run.record()["sessions"])}
            self.results.append(job, {**found, **about, "seconds": round(time.time() - began, 1)})

    def run(self, budget: float, console: Console) -> list[Job]:
        """Start what fits until the time is over. Returns the jobs that are left."""
        if not self.trial:
            clean_commit()
        scheduler = Scheduler(self, time.monotonic() + budget, console)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the end of a batch job stops the runs too
        try:
            scheduler.run()
        finally:
            scheduler.stop()
        return scheduler.left()


class Scheduler:
    """Starts jobs in order, at most `workers` at once."""

    def __init__(self, session: Session, deadline: float, console: Console) -> None:
        self.session, self.deadline, self.console = session, deadline, console
        self.jobs = session.queue.jobs()
        self.running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}  # its process, and when it began
        self.tried: set[str] = set()
        self.failures = self.successes = 0

    def left(self) -> list[Job]:
        done = self.session.results.read()
        return [job for job in self.jobs if job.key not in done]

    def run(self) -> None:
        while True:
            self._reap()
            hopeless = self.failures >= FAILURES and not self.successes
            while not hopeless and len(self.running) < self.session.workers and (job := self._next()) is not None:
                self._start(job)
            if hopeless and not self.running:
                raise AcutanceError(
                    f"{self.failures} runs failed and none succeeded: see the logs in {self.session.out}"
                )
            if not self.running or time.monotonic() > self.deadline:
                return
            time.sleep(0.2)

    def stop(self) -> None:
        """Ask runs that outlast the time to save themselves. They resume later if their folder is kept."""
        for job, (process, _) in self.running.items():
            self._say(f"stopping {job.label}")
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + GRACE
        for process, _ in self.running.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running = {}

    def _next(self) -> Job | None:
        """The first job that has no result, that no process runs, and that should end in time."""
        left, results = self.deadline - time.monotonic(), self.session.results.read()
        for job in self.jobs:
            if job.key in results or job.key in self.tried:
                continue
            if expected_seconds(job, results, self.session.workers, machine_name()) > left:
                continue
            with locks.held(self.session.lock(job)) as free:
                if free:
                    return job
        return None

    def _start(self, job: Job) -> None:
        session, results = self.session, self.session.results.read()
        seconds = expected_seconds(job, results, session.workers, machine_name())
        done = sum(each.key in results for each in self.jobs)
        self._say(f"[{done} of {len(self.jobs)} done] {job.label}: {job.key}, about {seconds:.0f} s")
        self.tried.add(job.key)
        words = [sys.executable, "-m", "acutance", "reproduce", "--queue", str(session.file), "--job", job.key]
        words += ["--out", str(session.out), "--workers", str(session.workers), "--device", session.device]
        words += [] if session.data_dir is None else ["--data-dir", str(session.data_dir)]
        words += ["--trial"] if session.trial else []
        # Divide the threads, since runs side by side would otherwise wait for each other.
        share = str(max(1, (os.cpu_count() or 1) // session.workers))
        threads = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share}
        environment = {**threads, **os.environ, BEGAN: str(time.time())}
        with session.log(job).open("ab") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        self.running[job] = process, time.monotonic()

    def _reap(self) -> None:
        for job, (process, began) in [*self.running.items()]:
            if process.poll() is None:
                continue
            del self.running[job]
            line, took = self.session.results.read().get(job.key), f"{time.monotonic() - began:.0f} s"
            self.failures, self.successes = self.failures + (line is None), self.successes + (line is not None)
            if line is None:
                log = self.session.log(job)
                self._say(f"{job.label} failed after {took}, status {process.returncode}; {log} ends:")
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                self._say("\n".join(lines[-LOG_LINES:]))
            elif "diverged" in line:
                self._say(f"{job.label} diverged after {took}: {line['diverged']}")
            else:
                score: Any = line["scores"][line["headline"]]
                self._say(f"{job.label}: {line['headline']} {score:.2f} on {line['split']} after {took}")

    def _say(self, words: str) -> None:
        self.console.print(escape(words), highlight=False, soft_wrap=True)
