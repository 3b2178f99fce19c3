"""train: a configuration and a folder in, a trained and recorded model out."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open

from acutance.distributed import gather
from acutance.errors import AcutanceError
from acutance.io.saving import CLASS_KEY, CONFIG_KEY
from acutance.lab.files import digest
from acutance.lab.locks import held, holder
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.checkpointer import checkpoint_paths
from acutance.lab.train.config import Config
from acutance.lab.train.engine import Engine
from acutance.lab.train.loop import Loop
from acutance.lab.train.run import Run, changes, config_without_incidentals, differences, listed, shown

# The length and the learning rate of a run. A resumed run may change them for the remaining steps.
COURSE = re.compile(r"loop\.epochs|schedule\..*|optim\.(?!name$).*")
# If these differ, the same tensors are another model. The shapes agree, so nothing else would notice.
NEVER_MEANT = ("heads", "norm", "cutoffs")


def train(
    config: Config,
    folder: Path | str,
    *,
    recipe: str | None = None,
    resume: bool = False,
    device: str = "auto",
    processes: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train, or resume training, and return the result: step, scores on the held-out slice, and the best score.

    Everything is written into the run's folder; `recipe` is a name for its record. `resume` starts from the newest
    checkpoint that is whole. `device` is cpu, cuda or auto. `processes` are started on this machine, for ddp and fsdp
    without torchrun.
    """
    run, console = Run(Path(folder)), console or Console()
    with ExitStack() as stack:
        if config.loop.deterministic:
            _make_deterministic(stack)
        engine = stack.enter_context(closing(Engine(config.loop, device=device, processes=processes)))
        done, start = engine.on_main(lambda: _check(run, config, resume))
        if done is not None:
            return done
        loop = Loop(config, run, engine, console)  # a run that cannot be built leaves nothing behind
        _refuse_unshared_folder(run, engine)
        # Two commands at once would write each other's checkpoints.
        if not engine.on_main(lambda: stack.enter_context(held(run.lock_path))):
            raise AcutanceError(
                f"{run.folder} is being trained by another command ({holder(run.lock_path)}): wait for it, or name "
                "another folder with --out"
            )
        loop.restored = loop.checkpointer.restore(loop.say)  # what does not fit is refused before anything is written
        engine.on_main(lambda: _resume(loop) if resume else _begin(loop, recipe, start))
        return loop.fit()


def _check(run: Run, config: Config, resume: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The result of a run that has nothing left to do, and the weights that a new one starts from."""
    if not resume:
        _refuse_existing(run)
        return None, initial_weights(config.task)
    changed = changes(run.config().to_dict(), config.to_dict())
    if not changed and (done := run.result()) is not None:
        return done, None
    _refuse_another_run(run, config)
    if (run.result_path.exists() or run.model_path.exists()) and not checkpoint_paths(run.checkpoints):
        raise AcutanceError(
            f"{run.folder} is finished, and {run.checkpoints} holds no checkpoint to resume from: start again with "
            "another --out"
        )
    return None, None


def _refuse_existing(run: Run) -> None:
    if run.exists():
        raise AcutanceError(f"{run.folder} holds a run already: --resume goes on with it, --out names another folder")


def _refuse_another_run(run: Run, config: Config) -> None:
    found = differences(run.config(), config)
    if "optim.name" in found:
        old, new = found["optim.name"]
        raise AcutanceError(
            f"{run.folder} is trained by {old}, whose moments {new} cannot use: leave optim.name as it is, or start "
            f"a new run from its weights (--set task.weights={run.model_path})"
        )
    weights = run.record().get("start") or {}

    def moved(name: str, new: str | None) -> bool:
        """Whether initial weights have another path, but the same content."""
        same = name in {f"task.{field}" for field in STARTS} and new is not None and Path(new).is_file()
        return same and digest(Path(str(new))) == weights.get("sha256")

    others = {name: pair for name, pair in found.items() if not COURSE.fullmatch(name) and not moved(name, pair[1])}
    if others:
        raise AcutanceError(
            f"{run.folder} cannot go on with {listed(others)}, which would make it another run: leave that as it was, "
            "or start a new run with another --out"
        )


def _refuse_unshared_folder(run: Run, engine: Engine) -> None:
    """All processes read what the main one writes, so all machines must see the same folder."""

    def mark() -> str:
        run.folder.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(dir=run.folder, prefix=".seen-")).name

    mark_path = run.folder / engine.on_main(mark)
    others = [place for place in gather(None if mark_path.exists() else str(run.folder.absolute())) if place]
    if engine.is_main:
        mark_path.rmdir()
        with suppress(OSError):  # a folder that holds a run stays
            run.folder.rmdir()
    if others:
        raise AcutanceError(
            f"{others[0]} is not the folder that the first process writes to: all machines need the same one, on a "
            "file system that they share. Name it with --out"
        )


def _begin(loop: Loop, recipe: str | None, start: Mapping[str, Any] | None) -> None:
    _refuse_existing(loop.run)  # begun by another command since it was checked
    if start is not None:
        loop.say(described(start))
    loop.run.begin(loop.config, recipe, loop.engine.world, start)


def _resume(loop: Loop) -> None:
    run, config, step = loop.run, loop.config, loop.restored or 0
    before, done = run.config(), run.result_path.exists()
    idle = changes(before.to_dict(), config.to_dict()) if done else differences(before, config, {"loop.epochs"})
    if step >= loop.total and idle:
        raise AcutanceError(
            f"nothing is left to train: {run.folder} is at step {step} of {loop.total}, so {listed(idle)} would change "
            "its record alone. Leave that as it was, or set more epochs (--set loop.epochs=…)"
        )
    if loop.restored is None:
        loop.say(f"{run.checkpoints} holds no checkpoint: starting over from step 0")
    loop.checkpointer.restore_best()
    run.result_path.unlink(missing_ok=True)  # a finished run that is made longer is unfinished again
    run.go_on(config, loop.engine.world)


def _make_deterministic(stack: ExitStack) -> None:
    """Until the stack is left, torch uses deterministic algorithms, or says that it has none."""
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def described(start: Mapping[str, Any]) -> str:
    """A sentence about the initial weights."""
    if start["model"] is None:
        return f"starts from {start['file']}, which does not say what it was trained with: only shapes are compared"
    by = "" if start["recipe"] is None else f" of the recipe {start['recipe']}"
    words = [f"{name} {shown(old)} there, {shown(new)} here" for name, (old, new) in start["differs"].items()]
    return f"starts from {start['file']}, a {start['model']}{by}: {'; '.join(words) or 'the same model'}"


def initial_weights(task: Any) -> dict[str, Any] | None:
    """A run's record of its initial weights, after checking them; None if it starts from scratch."""
    field = next((name for name in STARTS if getattr(task, name, None) is not None), None)
    if field is None:
        return None
    file = Path(getattr(task, field))
    if not file.is_file():
        raise _missing(field, file)
    model, trained = _read(file)
    choices = task.model.to_dict()
    wanted = "LanguageModel" if "vocabulary" in choices else "ViT"  # of a Segmenter, the encoder
    if model not in (None, wanted):
        raise AcutanceError(f"{file} holds a {model}, and this run starts from a {wanted}: name other weights")
    built = {"norm": "pre"} | choices  # a Segmenter's norm is always pre, without a field for it
    if "vocabulary" in trained:  # a language task takes its text's vocabulary, and the cut-offs below its size
        built["vocabulary"] = trained["vocabulary"]
        built["cutoffs"] = [cutoff for cutoff in built["cutoffs"] if cutoff < trained["vocabulary"]]
    if field == "encoder_weights":
        del built["num_classes"]  # of the head, which is not used
    differs = {name: [trained[name], new] for name, new in built.items() if trained.get(name, new) != new}
    for name in NEVER_MEANT:
        if name in differs:
            old, new = map(shown, differs[name])
            choice = f"--set task.model.{name}={old}, or " if name in choices else ""
            raise AcutanceError(
                f"{file} was trained with {name} {old}, and a model with {name} {new} would take the same tensors for "
                f"something else: {choice}start from other weights"
            )
    run = Run(file.parent)
    own = run.exists() and file in (run.model_path, run.best_path)
    return {
        "file": str(file),
        "sha256": digest(file),
        "model": model,  # its class, if the file says so
        "recipe": run.record()["recipe"] if run.exists() else None,
        "differs": differs,  # fields of the model: what the weights were trained with, what is being built
        "trained": config_without_incidentals(run) if own else None,  # what that run is made of
    }


def _read(file: Path) -> tuple[str | None, dict[str, Any]]:
    """The model's class and configuration, which published weights lack. A mitigation's parameters are refused."""
    if file.suffix != ".safetensors":
        return None, {}
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata, names = opened.metadata() or {}, list(opened.keys())
        trained = dict(json.loads(metadata.get(CONFIG_KEY, "{}")))
    except (SafetensorError, ValueError, TypeError) as error:
        raise AcutanceError(f"{file} is not a safetensors file, or it is damaged: {error}") from error
    if learnt := [name for name in names if ".mitigation." in name]:
        raise AcutanceError(
            f"{file} was trained with {trained.get('mitigation') or 'a mitigation'} and holds what that learnt "
            f"({learnt[0]}); a run starts from plain weights only. acutance.fold turns an eigen into plain weights; "
            "with another mitigation, continue its own run (--resume --set loop.epochs=…)"
        )
    return metadata.get(CLASS_KEY, "ViT") if trained else None, trained


def _missing(field: str, file: Path) -> AcutanceError:
    if file.is_dir():
        inside = Run(file).model_path if Run(file).exists() else file / "….safetensors"
        return AcutanceError(f"{file} is a folder: name the file, --set task.{field}={inside}")
    run = Run(file.parent)
    advice = f"its run is not finished. {run.how_to_go_on()}" if run.exists() else "train it first, or name another"
    return AcutanceError(f"there is no {file} to start from (task.{field}): {advice}")
