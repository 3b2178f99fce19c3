"""The training loop. Everything random in it is a function of (seed, step), so a run can be cut at any step."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.lab.tasks import Task, task_class
from acutance.lab.train.backends import attention_backend
from acutance.lab.train.checkpoint import Store
from acutance.lab.train.config import Config
from acutance.lab.train.engine import Engine
from acutance.lab.train.interrupt import Interrupt, StoppedError
from acutance.lab.train.keeper import Keeper
from acutance.lab.train.logs import Bar, Logs, Meter
from acutance.lab.train.nonfinite import DivergedError, locate, nonfinite_names
from acutance.lab.train.run import Run
from acutance.lab.train.schedule import learning_rate
from acutance.lab.train.state import TrainState, persistent
from acutance.lab.train.stepper import Parts, Stepper
from acutance.measure.monitor import Monitor
from acutance.sites.structure import shards_put_back

# Cheap enough to be read on the way; HFC/LFC during training is an open question of the field.
MONITORED = ("token_cosine", "rank_residual", "norm_spread", "hfc_lfc_frobenius")


class Loop:
    """One run in one process: the model, what trains it, and what keeps it."""

    def __init__(self, config: Config, run: Run, engine: Engine, console: Console) -> None:
        self.config, self.run, self.engine, self.console = config, run, engine, console
        loop = config.loop
        kind = task_class(config.task.kind)
        self.task: Task[Any] = processes.raise_on_all_ranks(
            lambda: kind(config.task, seed=loop.seed, device=engine.device)
        )
        self.steps_per_epoch = self.task.steps_per_epoch(loop.batch_size)
        self.total = max(1, round(loop.epochs * self.steps_per_epoch))
        begun = Store(run.checkpoints, loop.keep_last).newest_step()
        if begun is not None and begun > self.total:
            raise AcutanceError(
                f"{run.folder} is {begun} steps far, and loop.epochs={loop.epochs:g} ends after {self.total}: what was "
                "trained stays trained, so set more epochs, or start anew with another --out"
            )
        self.stepper = stepper = Stepper(config, engine, self.task, bare=begun is not None)
        self.model = stepper.model
        state = TrainState(stepper.model, stepper.optimiser, stepper.ema)
        self.keeper = Keeper(engine, run, self.task, state, loop.keep_last)
        self._taken: int | None = None  # the step of the checkpoint that was taken over

    def take_over(self) -> int:
        """Take over the newest checkpoint that is whole, if there is one; gives the step at which the run stands."""
        if self.keeper.has_checkpoints():
            self._taken = self.keeper.restore(self._say)
        return self._taken or 0

    def fit(self) -> dict[str, Any]:
        """Train from what was taken over to the run's end; gives what is written to result.json."""
        loop, engine, beginning = self.config.loop, self.engine, time.perf_counter()
        step = first_step = self._first_step()
        batches = self.stepper.batches(step)
        self._announce(step, first := next(batches))
        batches = chain([first], batches)
        monitor = self._monitor(step)
        logs = Logs(self.run.folder, step) if engine.is_main else None
        evaluate_every = max(1, round(loop.evaluate_every * self.steps_per_epoch))
        losses = torch.zeros(loop.log_every, device=engine.device)  # read on the host at log points only
        pending, meter, scores = 0, Meter(), self.keeper.scores
        bar = Bar(self.console, first=step, total=self.total, unit=self.task.unit, shown=engine.is_main)
        with bar, Interrupt() as interrupt:
            while step < self.total:
                losses[pending].copy_(self._step(step, next(batches)))
                step, pending = step + 1, pending + 1
                meter.count(self.task.units(loop.batch_size))
                bar.advance()
                if monitor is not None:
                    monitor.step(step)
                last = step == self.total
                evaluating, saving = last or step % evaluate_every == 0, last or step % loop.checkpoint_every == 0
                alone = interrupt.wanted and engine.world == 1  # several processes agree at the next log point
                if not (pending == loop.log_every or evaluating or saving or alone):
                    continue
                loss, stop = self._look(step, losses[:pending], interrupt)
                speed, pending, began = meter.read(), 0, time.perf_counter()
                epoch = step / self.steps_per_epoch
                bar.tell(epoch, loss, speed)
                entry = {"epoch": epoch, "loss": loss, "lr": self._rate(step - 1), f"{self.task.unit}/s": speed}
                entry["seconds"] = time.perf_counter() - beginning  # in this process, with all that is not training
                if evaluating:
                    scores = self._evaluate()
                    self.keeper.offer(step, scores)
                    entry |= {f"val/{name}": value for name, value in scores.items()}
                    self._say(f"epoch {epoch:.2f}  loss {loss:.4f}  val: {_listed(scores)}")
                if logs is not None:
                    with self.keeper.writing("the log"):
                        logs.write(step, entry)
                if saving or stop:
                    self.keeper.save(step)
                if stop and not last:
                    raise StoppedError(
                        f"stopped after step {step} of {self.total}, which is saved. {self.run.how_to_go_on()}"
                    )
                meter.skip(time.perf_counter() - began)
            if first_step == self.total:  # nothing was left to train, and the last scores may be of an earlier step
                scores = self._evaluate()
                self.keeper.offer(step, scores)
        if monitor is not None:
            monitor.finish(step)
        if logs is not None:
            logs.close()
        return self.keeper.finish(step, scores)

    def _step(self, step: int, parts: Parts) -> Tensor:
        return self.stepper(step, parts, self._rate(step))

    def _rate(self, step: int) -> float:
        return learning_rate(self.config.schedule, self.config.optim.lr, step, self.steps_per_epoch, self.total)

    def _look(self, step: int, losses: Tensor, interrupt: Interrupt) -> tuple[float, bool]:
        """The one place where the host waits for the device: the mean loss so far, and whether to stop."""
        wanted = torch.full((1,), float(interrupt.wanted), device=losses.device)
        *found, stop = self.engine.mean(torch.cat([losses, wanted])).tolist()
        for index, loss in enumerate(found):
            if not math.isfinite(loss):
                self._diverged(step - len(found) + index, loss)
        return sum(found) / len(found), stop > 0

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """On the held-out slice, with the mean of the weights if there is one."""
        ema = self.stepper.ema
        mean = nullcontext() if ema is None else ema.swapped()
        with mean, shards_put_back(self.model), self.engine.precision():
            scores = self.task.evaluate(self.model)
        self.model.train()
        return scores

    def _diverged(self, bad: int, loss: float) -> None:
        """Replay the step from the last good checkpoint, to say where the numbers stop being numbers."""
        step = self.keeper.restore()
        self.stepper.forget_recording()
        for earlier, parts in zip(range(step, bad), batches := self.stepper.batches(step), strict=False):
            self._step(earlier, parts)
        weights = nonfinite_names(dict(persistent(self.model)))
        where = (
            f"in {', '.join(weights[:3])} after the update before it" if weights else self._locate(bad, next(batches))
        )
        raise DivergedError(
            f"the loss became {loss} in step {bad + 1}, first {where}. The last good checkpoint is "
            f"{self.keeper.store.newest()} (step {step}). Lower optim.lr or set optim.clip: anew, or from there with "
            f"--set. {self.run.how_to_go_on()}"
        )

    def _locate(self, step: int, parts: Parts) -> str:
        """Every process looks at its shares; the first that finds something is quoted."""

        with shards_put_back(self.model):
            words = processes.gather(locate(self.model, lambda: self.stepper.losses(step, parts)))
        return next((found for found in words if not found.startswith("nowhere")), words[0])

    def _first_step(self) -> int:
        """Where to go on; a new run is saved at once, which shows that it can be, and gives a replay its start."""
        if self._taken is None:
            self.keeper.save(0)
            return 0
        self._say(f"going on after step {self._taken}")
        return self._taken

    def _monitor(self, step: int) -> Monitor | None:
        every, folder = self.config.loop.monitor_every, self.run.folder
        if every is None:
            return None
        autocast = torch.bfloat16 if self.config.loop.precision == "bf16" else None
        monitor = Monitor(
            self.model,
            self.task.probe(),
            metrics=MONITORED,
            part=self.task.monitored_part,
            every=every,
            jsonl=folder / "monitor.jsonl",
            tensorboard=folder / "tensorboard",
            autocast=autocast,
        )
        monitor.finish(step)
        return monitor

    def _announce(self, step: int, first: Parts) -> None:
        """What is about to happen, and on what."""
        loop, engine = self.config.loop, self.engine

        def forward() -> None:
            with engine.precision():
                self.task.loss(self.model, first[0])

        backend = attention_backend(self.model, forward)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
        how = {
            "compiled": loop.compile,
            "recorded as a CUDA graph": self.stepper.recorded,
            "deterministic": loop.deterministic,
        }
        self._say(
            f"{type(self.model).__name__} of {count:,} parameters on {device}: {engine.strategy}, "
            f"{engine.world} × {loop.accumulate} shares of a batch of {loop.batch_size}, {loop.precision}"
            f"{''.join(f', {word}' for word, holds in how.items() if holds)}\n"
            f"attention: {backend}\n"
            f"steps {step} to {self.total}, {self.steps_per_epoch} an epoch, into {self.run.folder}"
        )

    def _say(self, words: str) -> None:
        if self.engine.is_main:
            self.console.print(escape(words), highlight=False, soft_wrap=True)


def _listed(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in scores.items())
