"""What a run saves: checkpoints to resume from, the best model, the last model, and their scores.

A checkpoint is either whole or absent. It is checked when written and when read, and never unpickled.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as tensor_bytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from acutance import sites
from acutance.errors import AcutanceError
from acutance.explain.steer import check_spectrum
from acutance.files.atomic import atomic_write
from acutance.io.saving import save
from acutance.lab.files import digest, finite
from acutance.lab.tasks import Task
from acutance.lab.train.engine import raise_on_all_ranks
from acutance.lab.train.log import DivergedError, nonfinite_names
from acutance.lab.train.optim import persistent
from acutance.lab.train.run import Run
from acutance.lab.train.step import TrainStep
from acutance.measure.monitor import own_randomness
from acutance.mitigations import eigen_of
from acutance.models import BlockStack

FORMAT = "acutance-checkpoint/1"
MANIFEST = "checkpoint.json"
MODEL, OPTIMISER, EMA = "model.safetensors", "optimiser.safetensors", "ema.safetensors"
BEST = "best.safetensors"  # the best model when the checkpoint was written, as a link to its file
NAME = re.compile(r"step-(\d{9})")

Tensors = Mapping[str, Mapping[str, Tensor]]  # by file, then by name


class DamagedError(AcutanceError):
    """A checkpoint is not what was written."""


def checkpoint_paths(folder: Path) -> list[Path]:
    """A run's checkpoints, newest first, unchecked."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), reverse=True)


def step_of(path: Path) -> int:
    """The number of steps after which a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def write_checkpoint(
    folder: Path, tensors: Tensors, notes: Mapping[str, Any], keep_last: int, best: Path | None = None
) -> None:
    """Write under another name, flush to disk, rename, read back; then remove all but the newest `keep_last`.

    A failure before the rename (a full disk, Ctrl-C, a crash) leaves nothing behind. The checkpoint also holds the file
    of the `best` model so far.
    """
    path = folder / f"step-{notes['step']:09d}"
    if not path.exists():
        _write(path, tensors, notes, best)
    for old in checkpoint_paths(folder)[keep_last:]:
        shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, tensors: Tensors, notes: Mapping[str, Any], best: Path | None) -> None:
    temporary = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
    try:
        files = {}
        for name, content in tensors.items():
            body = tensor_bytes({key: value.contiguous() for key, value in content.items()})
            files[name] = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
            atomic_write(temporary / name, body)
        manifest = {"format": FORMAT, "files": files, "notes": notes}
        atomic_write(temporary / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
        if best is not None and best.exists():
            try:
                os.link(best, temporary / BEST)
            except OSError:  # a file system without links
                shutil.copyfile(best, temporary / BEST)
        _flush_folder(temporary)
        temporary.rename(folder)
        _flush_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # if it was not renamed
    try:
        _checked_manifest(folder)
    except DamagedError as error:  # a disk that reports success and did not write
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(errno.EIO, f"what was written reads back wrong ({error})", str(folder)) from error


def read_checkpoint(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and notes. Raises `DamagedError` if a file is missing, cut off, changed or not a tensor file."""
    manifest = _checked_manifest(folder)
    try:
        return {name: load_file(folder / name) for name in manifest["files"]}, manifest["notes"]
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"{folder}: not a safetensors file, and nothing else is ever read: {error}") from error


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones, which are renamed to `damaged-…`.

    If none is whole, all keep their names. Otherwise the run would look as if it never had a checkpoint.
    """
    damaged: dict[Path, str] = {}
    for path in checkpoint_paths(folder):
        try:
            read_checkpoint(path)
        except DamagedError as error:
            damaged[path] = str(error)
            continue
        for bad in damaged:
            shutil.rmtree(aside := bad.with_name(f"damaged-{bad.name}"), ignore_errors=True)
            bad.rename(aside)
        return path, [f"{words}; put aside as damaged-{bad.name}" for bad, words in damaged.items()]
    return None, list(damaged.values())


def _checked_manifest(folder: Path) -> Any:
    """The manifest, if all files agree with it. A file without permission, or of another version, is not damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            found = f"{folder}: format {manifest['format']!r}, this version reads {FORMAT!r}"
            raise AcutanceError(f"{found}: resume with the version that wrote it")
        for name, expected in manifest["files"].items():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise DamagedError(f"{folder}: {name!r} is no name of a tensor file")
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                raise DamagedError(f"{folder}: {name} has {size} bytes of {expected['bytes']}")
            if digest(folder / name) != expected["sha256"]:
                raise DamagedError(f"{folder}: {name} was changed after it was written (its checksum differs)")
        if (written := manifest["notes"]["step"]) != step_of(folder):
            raise DamagedError(f"{folder}: its manifest is that of step {written}")
    except PermissionError as error:
        raise AcutanceError(f"{folder} may not be read by this user: {error}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder}: unreadable: {error!r}") from error
    return manifest


def _flush_folder(folder: Path) -> None:
    """Make the names in it survive a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpointer:
    """Every process calls every method, since sharded tensors need all of them. The main process writes.

    Tensors are saved whole, so a run can resume with another number of processes or another strategy.
    """

    def __init__(self, run: Run, train_step: TrainStep) -> None:
        self._run, self._train_step = run, train_step
        self._engine, self._task = train_step.engine, train_step.task
        self.best: dict[str, Any] | None = None  # step and score
        self.scores: dict[str, float] = {}  # of the last evaluation

    def newest(self) -> Path | None:
        return next(iter(checkpoint_paths(self._run.checkpoints)), None)

    def restore(self, say: Callable[[str], None] = lambda words: None) -> int | None:
        """Restore the newest whole checkpoint, say what is wrong with newer ones, and return its step; None if none."""
        path, complaints = self._engine.on_main(lambda: newest_whole(self._run.checkpoints))
        for complaint in complaints:
            say(f"damaged checkpoint {complaint}")
        if path is None:
            if not complaints:
                return None
            raise AcutanceError(
                f"none of the checkpoints in {self._run.checkpoints} is whole: start again in another folder, "
                "without --resume"
            )
        tensors, notes = raise_on_all_ranks(lambda: read_checkpoint(path))
        restore_state(self._train_step, tensors)
        self.best = notes["best"] if (path / BEST).exists() else None
        self.scores = {name: math.nan if score is None else score for name, score in notes["scores"].items()}
        return step_of(path)

    def restore_best(self) -> None:
        """Put back the best model as of the newest checkpoint; later steps are lost or trained again."""
        path = self.newest()
        if path is None or not (path / BEST).exists():
            self._run.best_path.unlink(missing_ok=True)
        else:
            atomic_write(self._run.best_path, lambda target: shutil.copyfile(path / BEST, target))

    def save(self, step: int) -> None:
        """Write a checkpoint. Weights with a NaN or an infinity are refused, so that the last checkpoint is good."""
        run, tensors = self._run, gather_state(self._train_step)
        if bad := nonfinite_names(tensors[MODEL]):
            raise DivergedError(
                f"after step {step}, whose loss was finite, {', '.join(bad[:3])} hold no numbers: its gradient "
                f"overflowed. The last good checkpoint is {self.newest()}. Lower optim.lr or set optim.clip"
            )
        notes = {"step": step, "best": self.best, "scores": finite(self.scores), "processes": self._engine.world}
        kept = self._train_step.config.loop.keep_last, run.best_path
        what = f"the checkpoint of step {step}"
        self.write(what, lambda: write_checkpoint(run.checkpoints, tensors, notes, *kept))

    def write(self, what: str, function: Callable[[], None]) -> None:
        """Run `function` in the main process. If the disk is full or gone, say which checkpoint is left."""
        try:
            self._engine.on_main(function)
        except OSError as error:
            last = self.newest()
            left = "No checkpoint was saved yet" if last is None else f"The last good checkpoint is {last}, untouched"
            raise AcutanceError(
                f"{what} could not be written: {error}. {left}. Make room first. {self._run.how_to_go_on()}"
            ) from error

    def save_if_best(self, step: int, scores: dict[str, float]) -> None:
        """Export the model if it is the best so far."""
        self.scores = scores
        score, sign = scores[self._task.headline], 1 if self._task.higher_is_better else -1
        if math.isfinite(score) and (self.best is None or sign * score > sign * self.best["score"]):
            self.best = {"step": step, "score": score}
            self._export(self._run.best_path)

    def finish(self, step: int) -> dict[str, Any]:
        """Export the last model and write the result."""
        self._export(self._run.model_path, last=True)
        result = {"step": step, "scores": finite(self.scores), "headline": self._task.headline, "best": self.best}
        self.write("the result", lambda: self._run.write_result(result))
        return result

    def _export(self, path: Path, *, last: bool = False) -> None:
        """Save a model that `acutance.load` reads, with the mean of the weights if there is one."""
        tensors = gather_state(self._train_step)

        def write() -> None:
            with own_randomness():
                model: nn.Module = self._task.bare_model()
            _copy(persistent(model), {**tensors[MODEL], **tensors.get(EMA, {})})
            save(model, path)
            if last:
                self._check_spectra(model)

        self.write(str(path), write)

    def _check_spectra(self, model: nn.Module) -> None:
        """Warn of steered layers whose spectrum has crossed the bound, given attention's μ_min on the probe."""
        for part, module in model.named_modules():
            if isinstance(module, BlockStack) and any(eigen_of(site.mitigation) for site in sites.find(module)):
                without = type(self._task).inputs is Task.inputs  # then μ_min is taken as 0
                check_spectrum(model, batch=None if without else self._task.probe(), part=part)


def gather_state(train_step: TrainStep) -> dict[str, dict[str, Tensor]]:
    """Weights, moments and running mean by file and name, unsharded on the CPU."""
    moments = {
        f"{name}/{key}": value
        for name, parameter in _optimised(train_step)
        for key, value in train_step.optimiser.state.get(parameter, {}).items()
    }
    parts = {MODEL: persistent(train_step.model), OPTIMISER: moments}
    if train_step.ema is not None:
        parts[EMA] = train_step.ema.mean
    return {file: {name: _whole(value.detach()) for name, value in part.items()} for file, part in parts.items()}


def restore_state(train_step: TrainStep, tensors: Tensors) -> None:
    """The inverse of `gather_state`."""
    _copy(persistent(train_step.model), tensors[MODEL])
    numbered = {name: (index, parameter) for index, (name, parameter) in enumerate(_optimised(train_step))}
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors[OPTIMISER].items():
        name, _, key = full_name.rpartition("/")
        if name in numbered:
            index, parameter = numbered[name]
            state.setdefault(index, {})[key] = _like(value, parameter)
    groups = train_step.optimiser.state_dict()["param_groups"]
    train_step.optimiser.load_state_dict({"state": state, "param_groups": groups})  # which places each counter
    if train_step.ema is not None:
        _copy(train_step.ema.mean, tensors.get(EMA, {}))


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _optimised(train_step: TrainStep) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters in the optimiser's order."""
    names = {parameter: name for name, parameter in train_step.model.named_parameters()}
    for group in train_step.optimiser.param_groups:
        yield from ((names[parameter], parameter) for parameter in group["params"])


@torch.no_grad()
def _copy(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    if own.keys() != tensors.keys():
        other = sorted(own.keys() ^ tensors.keys())
        raise AcutanceError(
            f"the checkpoint is of another model: {', '.join(other[:4])}{' …' if len(other) > 4 else ''} are in only "
            "one of the two. Resume with the configuration it was trained with, or start again in another folder"
        )
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            raise AcutanceError(f"{name} is {tuple(tensors[name].shape)} in the checkpoint, {tuple(value.shape)} here")
        value.copy_(_like(tensors[name], value))


def _like(value: Tensor, other: Tensor) -> Tensor:
    """The value on the other's device, and sharded like it. A value of another shape (a counter) stays as it is."""
    if value.shape != other.shape:
        return value
    if not isinstance(other, DTensor):
        return value.to(other.device)
    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements)
