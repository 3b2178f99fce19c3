"""What a run starts from: what its weights were trained with, beside what is being built."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from acutance.errors import AcutanceError
from acutance.files.atomic import digest
from acutance.io.saving import CLASS_KEY, CONFIG_KEY
from acutance.lab.tasks import task_class
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.run import INCIDENTAL, Run

# With these the same tensors are another model, which nothing would notice: shapes stay as they are.
NEVER_MEANT = ("heads", "norm", "cutoffs")
LEARNT = ".mitigation."  # in the names of a mitigation's parameters


@dataclass(frozen=True)
class Origin:
    """The file a run starts from."""

    file: str
    sha256: str
    model: str | None  # its class, if the file says so
    recipe: str | None  # of the run it lies in, if it does
    differs: dict[str, list[Any]]  # fields of the model: what the weights were trained with, what is being built
    trained: dict[str, Any] | None = None  # the essence of the run of which these are the last or the best weights

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the run's record."""
        return asdict(self)

    def __str__(self) -> str:
        if self.model is None:
            return f"starts from {self.file}, which does not say what it was trained with: only shapes are compared"
        by = "" if self.recipe is None else f" of the recipe {self.recipe}"
        words = [f"{name} {_shown(old)} there, {_shown(new)} here" for name, (old, new) in self.differs.items()]
        return f"starts from {self.file}, a {self.model}{by}: {'; '.join(words) or 'the same model'}"


def origin_of(task: Any) -> Origin | None:
    """What a task's configuration starts from, checked; None if it starts from scratch."""
    named = {name: value for name in STARTS if (value := getattr(task, name, None)) is not None}
    if not named:
        return None
    field, path = next(iter(named.items()))
    file = Path(path)
    if not file.is_file():
        raise _missing(field, file)
    model, trained, learnt = _read(file)
    built = {"norm": "pre"} | task.model.to_dict()  # as a Segmenter's always is, without saying so
    _refuse_other_class(file, model, built)
    differs = _differing(trained, built, only_encoder=field == "encoder_weights")
    _refuse_never_meant(file, differs, task.model.to_dict())
    _refuse_learnt(file, trained, learnt)
    run = Run(file.parent)
    recipe = run.recipe() if run.exists() else None
    of_run = essence(run) if run.exists() and file in (run.model_path, run.best_path) else None
    return Origin(str(file), digest(file), model, recipe, differs, of_run)


def essence(run: Run) -> dict[str, Any]:
    """What a run is made of, less what is incidental and what only its test reads.

    Runs of one essence differ in their seeds, and so may the runs that they start from.
    """
    plain, start = run.config().to_dict(), run.start()
    task = task_class(plain["task"]["kind"])
    tested = {f"task.{name}" for name in {*task.evaluated_by("test")} - {*task.evaluated_by("val")}}
    return {
        part: {
            name: _weights(value, start) if name in STARTS else value
            for name, value in content.items()
            if f"{part}.{name}" not in INCIDENTAL | tested
        }
        for part, content in plain.items()
    }


def _weights(path: str | None, start: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """What weights are, of whichever seed: their run's essence and which of its files, or else the very file."""
    if path is None or start is None:  # a start that no record tells of has only its path
        return path
    if start.get("trained") is None:
        return f"sha256 {start['sha256'][:16]}"
    return {"file": Path(start["file"]).name, **start["trained"]}


def _read(file: Path) -> tuple[str | None, dict[str, Any], list[str]]:
    """Class and configuration of the model, and the names of its mitigation's parameters.

    Published weights tell nothing; they are read when the model is built, which refuses what does not fit.
    """
    if file.suffix != ".safetensors":
        return None, {}, []
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata, names = opened.metadata() or {}, list(opened.keys())
        trained = json.loads(metadata.get(CONFIG_KEY, "{}"))
    except (SafetensorError, ValueError) as error:
        raise AcutanceError(f"{file} is not a safetensors file, or it is damaged: {error}") from error
    return metadata.get(CLASS_KEY, "ViT") if trained else None, trained, [name for name in names if LEARNT in name]


def _refuse_other_class(file: Path, model: str | None, built: Mapping[str, Any]) -> None:
    wanted = "LanguageModel" if "vocabulary" in built else "ViT"  # of a Segmenter, the encoder
    if model not in (None, wanted):
        raise AcutanceError(f"{file} holds a {model}, and this run starts from a {wanted}: name other weights")


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], *, only_encoder: bool) -> dict[str, list[Any]]:
    """Fields that both have and that differ."""
    built = dict(here)
    if "vocabulary" in there:  # a language task takes its text's, and the cut-offs below it
        built["vocabulary"] = there["vocabulary"]
        built["cutoffs"] = [cutoff for cutoff in here["cutoffs"] if cutoff < there["vocabulary"]]
    if only_encoder:
        del built["num_classes"]  # of the head, which stays behind
    return {name: [there[name], new] for name, new in built.items() if name in there and there[name] != new}


def _refuse_never_meant(file: Path, differs: Mapping[str, list[Any]], choices: Mapping[str, Any]) -> None:
    for name in NEVER_MEANT:
        if name in differs:
            old, new = map(_shown, differs[name])
            choice = f"--set task.model.{name}={old}, or " if name in choices else ""
            raise AcutanceError(
                f"{file} was trained with {name} {old}, and a model with {name} {new} would take the same tensors for "
                f"something else: {choice}start from other weights"
            )


def _refuse_learnt(file: Path, trained: Mapping[str, Any], learnt: Sequence[str]) -> None:
    if learnt:
        raise AcutanceError(
            f"{file} was trained with {trained.get('mitigation') or 'a mitigation'} and holds what that learnt "
            f"({learnt[0]}); a run starts from plain weights only. An eigen is put into them by acutance.fold; with "
            "another mitigation, go on with its own run (--resume --set loop.epochs=…)"
        )


def _missing(field: str, file: Path) -> AcutanceError:
    if file.is_dir():
        run = Run(file)
        inside = run.model_path if run.exists() else file / "….safetensors"
        return AcutanceError(f"{file} is a folder: name the file, --set task.{field}={inside}")
    run = Run(file.parent)
    advice = f"its run is not finished. {run.how_to_go_on()}" if run.exists() else "train it first, or name another"
    return AcutanceError(f"there is no {file} to start from (task.{field}): {advice}")


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
