"""The training loop. Everything random in it depends on (seed, step) alone, so a run can resume from any step."""

import math
import time
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from acutance.distributed import gather
from acutance.errors import AcutanceError
from acutance.lab.tasks import Task, task_class
from acutance.lab.train import log as logs
from acutance.lab.train.checkpointer import Checkpointer, checkpoint_paths, step_of
from acutance.lab.train.config import Config
from acutance.lab.train.engine import Engine, raise_on_all_ranks
from acutance.lab.train.log import DivergedError, StoppedError, nonfinite_names
from acutance.lab.train.optim import learning_rate, persistent
from acutance.lab.train.run import Run
from acutance.lab.train.step import Parts, TrainStep
from acutance.measure.monitor import Monitor
from acutance.sites.structure import shards_put_back

# Cheap enough to measure during training. How HFC/LFC moves in training is an open question of the field.
MONITORED = ("token_cosine", "rank_residual", "norm_spread", "hfc_lfc_frobenius")


class Loop:
    """One run in one process: the model, its training step and its checkpoints."""

    def __init__(self, config: Config, run: Run, engine: Engine, console: Console) -> None:
        self.config, self.run, self.engine, self.console = config, run, engine, console
        loop, kind = config.loop, task_class(config.task.kind)
        self.task: Task[Any] = raise_on_all_ranks(lambda: kind(config.task, seed=loop.seed, device=engine.device))
        self.steps_per_epoch = self.task.steps_per_epoch(loop.batch_size)
        self.total = max(1, round(loop.epochs * self.steps_per_epoch))
        begun = max(map(step_of, checkpoint_paths(run.checkpoints)), default=None)
        if begun is not None and begun > self.total:
            raise AcutanceError(
                f"{run.folder} is at step {begun}, but loop.epochs={loop.epochs:g} ends after {self.total}: set more "
                "epochs, or start again with another --out"
            )
        self.train_step = TrainStep(config, engine, self.task, bare=begun is not None)
        self.model = self.train_step.model
        self.checkpointer = Checkpointer(run, self.train_step)
        self.restored: int | None = None  # the step of the checkpoint that the run resumes from

    def fit(self) -> dict[str, Any]:
        """Train from the restored step to the end. Returns the content of result.json."""
        loop, engine, beginning = self.config.loop, self.engine, time.perf_counter()
        if self.restored is None:
            self.checkpointer.save(0)  # shows at once that saving works, and gives a replay its start
        else:
            self.say(f"going on after step {self.restored}")
        step = first_step = self.restored or 0
        batches = self.train_step.batches(step)
        self._announce(step, first := next(batches))
        batches = chain([first], batches)
        monitor = self._monitor(step)
        log: Any = logs.Log(self.run.folder, step) if engine.is_main else None
        evaluate_every = max(1, round(loop.evaluate_every * self.steps_per_epoch))
        losses = torch.zeros(loop.log_every, device=engine.device)  # read on the host at log points only
        pending = 0
        bar = logs.Bar(self.console, first=step, total=self.total, unit=self.task.unit, shown=engine.is_main)
        with bar.progress, logs.interruptible() as interrupts:
            while step < self.total:
                losses[pending].copy_(self._step(step, next(batches)))
                step, pending = step + 1, pending + 1
                bar.advance(self.task.units(loop.batch_size))
                if monitor is not None:
                    with engine.eager():
                        monitor.step(step)
                last = step == self.total
                evaluating, saving = last or step % evaluate_every == 0, last or step % loop.checkpoint_every == 0
                alone = bool(interrupts) and engine.world == 1  # several processes agree at the next log point
                if not (pending == loop.log_every or evaluating or saving or alone):
                    continue
                loss, stop = self._read(step, losses[:pending], interrupts)
                pending, epoch = 0, step / self.steps_per_epoch
                speed = bar.tell(epoch, loss)
                entry = {"epoch": epoch, "loss": loss, "lr": self._rate(step - 1), f"{self.task.unit}/s": speed}
                entry["seconds"] = time.perf_counter() - beginning  # in this process, with all that is not training
                if evaluating:
                    scores = self._evaluate(step)
                    entry |= {f"val/{name}": value for name, value in scores.items()}
                    listed = "  ".join(f"{name} {value:.4g}" for name, value in scores.items())
                    seen = getattr(self.config.task, "train_on", None) == "all"
                    name = "val, which it is trained on" if seen else "val"
                    self.say(f"epoch {epoch:.2f}  loss {loss:.4f}  {name}: {listed}")
                self.checkpointer.write("the log", partial(logs.Log.write, log, step, entry))
                if saving or stop:
                    self.checkpointer.save(step)
                if stop and not last:
                    raise StoppedError(
                        f"stopped after step {step} of {self.total}, which is saved. {self.run.how_to_go_on()}"
                    )
                bar.skip()
            if first_step == self.total:  # nothing was left to train, and the last scores may be of an earlier step
                self._evaluate(step)
        if monitor is not None:
            with engine.eager():
                monitor.finish(step)
        if log is not None:
            log.close()
        return self.checkpointer.finish(step)

    def _step(self, step: int, parts: Parts) -> Tensor:
        return self.train_step(step, parts, self._rate(step))

    def _rate(self, step: int) -> float:
        return learning_rate(self.config.schedule, self.config.optim.lr, step, self.steps_per_epoch, self.total)

    def _read(self, step: int, losses: Tensor, interrupts: list[int]) -> tuple[float, bool]:
        """The mean loss since the last log point, and whether to stop. Only here the host waits for the device."""
        wanted = torch.full((1,), float(bool(interrupts)), device=losses.device)
        *found, stop = self.engine.mean(torch.cat([losses, wanted])).tolist()
        for index, loss in enumerate(found):
            if not math.isfinite(loss):
                self._raise_diverged(step - len(found) + index, loss)
        return sum(found) / len(found), stop > 0

    @torch.no_grad()
    def _evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out slice, with the mean of the weights if there is one, and save the best model."""
        mean = nullcontext() if self.train_step.ema is None else self.train_step.ema.swapped()
        with mean, shards_put_back(self.model), self.engine.precision(), self.engine.eager():
            scores = self.task.evaluate(self.model)
        self.model.train()
        self.checkpointer.save_if_best(step, scores)
        return scores

    def _raise_diverged(self, bad: int, loss: float) -> None:
        """Replay the step from the last good checkpoint to find where the first NaN or infinity appears."""
        step = self.checkpointer.restore() or 0
        self.train_step.graphed = None  # a graph would still use the weights and moments that were replaced
        for earlier, parts in zip(range(step, bad), batches := self.train_step.batches(step), strict=False):
            self._step(earlier, parts)
        if weights := nonfinite_names(persistent(self.model)):
            where = f"in {', '.join(weights[:3])} after the update before it"
        else:
            parts = next(batches)
            # Every process looks at its own slices; the first finding is quoted.
            with shards_put_back(self.model), self.engine.eager():
                words = gather(logs.locate(self.model, lambda: self.train_step.losses(bad, parts)))
            where = next((found for found in words if not found.startswith("nowhere")), words[0])
        raise DivergedError(
            f"the loss became {loss} in step {bad + 1}, first {where}. The last good checkpoint is "
            f"{self.checkpointer.newest()} (step {step}). Lower optim.lr or set optim.clip, in a new run or from there "
            f"with --set. {self.run.how_to_go_on()}"
        )

    def _monitor(self, step: int) -> Monitor | None:
        every, folder, task = self.config.loop.monitor_every, self.run.folder, self.task
        if every is None:
            return None
        how: dict[str, Any] = {"metrics": MONITORED, "part": task.monitored_part, "every": every}
        how |= {"autocast": torch.bfloat16 if self.config.loop.precision == "bf16" else None}
        how |= {"jsonl": folder / "monitor.jsonl", "tensorboard": folder / "tensorboard"}
        monitor = Monitor(self.model, task.probe(), **how)
        with self.engine.eager():
            monitor.finish(step)
        return monitor

    def _announce(self, step: int, first: Parts) -> None:
        """Say what is about to run, and on which device."""
        loop, engine = self.config.loop, self.engine
        with engine.eager(), engine.precision():
            backend = logs.attention_backend(self.model, lambda: self.task.loss(self.model, first[0]))
        count = sum(parameter.numel() for parameter in self.model.parameters())
        device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
        how = {"compiled": loop.compile, "block by block": loop.compile_blocks}
        how |= {"as a CUDA graph": self.train_step.graphed is not None, "deterministic": loop.deterministic}
        self.say(
            f"{type(self.model).__name__} of {count:,} parameters on {device}: {engine.strategy}, "
            f"{engine.world} × {loop.accumulate} parts of a batch of {loop.batch_size}, {loop.precision}"
            f"{''.join(f', {word}' for word, holds in how.items() if holds)}\n"
            f"attention: {backend}\n"
            f"steps {step} to {self.total}, {self.steps_per_epoch} an epoch, into {self.run.folder}"
        )

    def say(self, words: str) -> None:
        if self.engine.is_main:
            self.console.print(escape(words), highlight=False, soft_wrap=True)
