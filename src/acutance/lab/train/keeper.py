"""What a run keeps: checkpoints to go on from, the best model, the last one, and how good they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from acutance import distributed as processes
from acutance import sites
from acutance.errors import AcutanceError
from acutance.explain.steer import check_spectrum
from acutance.files.atomic import finite
from acutance.io.saving import save
from acutance.lab.tasks import Task
from acutance.lab.train.checkpoint import Checkpoint, Store, read_folder
from acutance.lab.train.engine import Engine
from acutance.lab.train.nonfinite import DivergedError, nonfinite_names
from acutance.lab.train.run import Run
from acutance.lab.train.state import EMA, MODEL, TrainState, restore_model
from acutance.measure.monitor import own_randomness
from acutance.mitigations import eigen_of
from acutance.models import BlockStack


class Keeper:
    """Every process calls every method: sharded tensors need all of them. The main one writes."""

    def __init__(self, engine: Engine, run: Run, task: Task[Any], state: TrainState, keep_last: int) -> None:
        self._engine, self._run, self._task, self._state = engine, run, task, state
        self.store = Store(run.checkpoints, keep_last)
        self.best: dict[str, Any] | None = None  # step and score
        self.scores: dict[str, float] = {}  # of the last evaluation

    def has_checkpoints(self) -> bool:
        """Whether there is something to go on from, whole or not."""
        return self._engine.on_main(lambda: self.store.newest() is not None)

    def restore(self, say: Callable[[str], None] = lambda words: None) -> int:
        """Take over the newest checkpoint that is whole, saying what was wrong with newer ones; gives its step."""
        path, complaints = self._engine.on_main(self._newest)
        for complaint in complaints:
            say(f"damaged checkpoint {complaint}")
        if path is None:
            raise AcutanceError(
                f"none of the checkpoints in {self.store.folder} is whole: start anew in another folder, "
                "without --resume"
            )
        found: Checkpoint = processes.raise_on_all_ranks(lambda: read_folder(path))
        self._state.restore(found.tensors)
        self.best = found.notes["best"]
        self.scores = {name: math.nan if score is None else score for name, score in found.notes["scores"].items()}
        return found.step

    def _newest(self) -> tuple[Path | None, list[str]]:
        found, complaints = self.store.newest_good()
        return (None if found is None else found.path), complaints

    def save(self, step: int) -> None:
        """Write a checkpoint, unless the weights are no numbers any more: the last good one stays the last good one."""
        tensors = self._state.gather()
        notes = {"step": step, "best": self.best, "scores": finite(self.scores), "processes": self._engine.world}

        def write() -> list[str]:
            bad = nonfinite_names(tensors[MODEL])
            if not bad:
                self.store.write(step, tensors, notes)
            return bad

        last = self.store.newest()
        with self.writing(f"the checkpoint of step {step}"):
            bad = self._engine.on_main(write)
        if bad:
            raise DivergedError(
                f"after step {step}, whose loss was finite, {', '.join(bad[:3])} hold no numbers any more: the "
                f"gradient overflowed. The last good checkpoint is {last}. Lower optim.lr or set optim.clip"
            )

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Inside, a disk that is full or gone is told as such, with what is left to go on from."""
        last = self.store.newest()
        try:
            yield
        except OSError as error:
            left = "No checkpoint was saved yet" if last is None else f"The last good checkpoint is {last}, untouched"
            raise AcutanceError(
                f"{what} could not be written: {error}. {left}. Make room first. {self._run.how_to_go_on()}"
            ) from error

    def offer(self, step: int, scores: dict[str, float]) -> None:
        """Keep the model if it is the best so far."""
        self.scores = scores
        score, sign = scores[self._task.headline], 1 if self._task.higher_is_better else -1
        if math.isfinite(score) and (self.best is None or sign * score > sign * self.best["score"]):
            self.best = {"step": step, "score": score}
            self._export(self._run.best_path)

    def finish(self, step: int, scores: dict[str, float]) -> dict[str, Any]:
        """Write the last model and the result."""
        self._export(self._run.model_path, last=True)
        result = {"step": step, "scores": finite(scores), "headline": self._task.headline, "best": self.best}
        with self.writing("the result"):
            self._engine.on_main(lambda: self._run.write_result(result))
        return result

    def _export(self, path: Path, *, last: bool = False) -> None:
        """As a model that `acutance.load` reads; the mean of the weights where there is one."""
        tensors = self._state.gather()
        weights = {**tensors[MODEL], **tensors.get(EMA, {})}
        with self.writing(str(path)):
            self._engine.on_main(lambda: self._save_plain(weights, path, last))

    def _save_plain(self, weights: dict[str, Tensor], path: Path, last: bool) -> None:
        with own_randomness():
            model: nn.Module = self._task.bare_model()
        restore_model(model, weights)
        save(model, path)
        if last:
            self._check_spectra(model)

    def _check_spectra(self, model: nn.Module) -> None:
        """Warn of steered layers whose spectrum has crossed the bound, at the μ_min attention has on the probe."""
        steered = [
            name for name, module in model.named_modules() if isinstance(module, BlockStack) and _steered(module)
        ]
        probe = self._probe() if steered else None
        for part in steered:
            check_spectrum(model, batch=probe, part=part)

    def _probe(self) -> Any:
        """None where the task has none: then μ_min is taken as 0."""
        return None if type(self._task).probe is Task.probe else self._task.probe()


def _steered(stack: BlockStack) -> bool:
    return any(eigen_of(site.mitigation) is not None for site in sites.find(stack))
