"""The weights a run starts from: what they were trained with, compared with what is being built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from acutance.errors import AcutanceError
from acutance.files.atomic import digest
from acutance.io.saving import CLASS_KEY, CONFIG_KEY
from acutance.lab.tasks import task_class
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.config import incidental_fields
from acutance.lab.train.run import Run

# With these the same tensors are another model, which nothing would notice: shapes stay as they are.
NEVER_MEANT = ("heads", "norm", "cutoffs")


@dataclass(frozen=True)
class InitialWeights:
    """The file a run starts from."""

    file: str
    sha256: str
    model: str | None  # its class, if the file says so
    recipe: str | None  # of the run it lies in, if it does
    differs: dict[str, list[Any]]  # fields of the model: what the weights were trained with, what is being built
    trained: dict[str, Any] | None = None  # what that run is made of, if these are its last or its best weights

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the run's record."""
        return asdict(self)

    def __str__(self) -> str:
        if self.model is None:
            return f"starts from {self.file}, which does not say what it was trained with: only shapes are compared"
        by = "" if self.recipe is None else f" of the recipe {self.recipe}"
        words = [f"{name} {shown(old)} there, {shown(new)} here" for name, (old, new) in self.differs.items()]
        return f"starts from {self.file}, a {self.model}{by}: {'; '.join(words) or 'the same model'}"


def initial_weights(task: Any) -> InitialWeights | None:
    """What a task's configuration starts from, checked; None if it starts from scratch."""
    named = {name: value for name in STARTS if (value := getattr(task, name, None)) is not None}
    if not named:
        return None
    field, path = next(iter(named.items()))
    file = Path(path)
    if not file.is_file():
        raise _missing(field, file)
    model, trained = _read(file)
    choices = task.model.to_dict()
    wanted = "LanguageModel" if "vocabulary" in choices else "ViT"  # of a Segmenter, the encoder
    if model not in (None, wanted):
        raise AcutanceError(f"{file} holds a {model}, and this run starts from a {wanted}: name other weights")
    built = {"norm": "pre"} | choices  # a Segmenter's norm is always pre, without a field for it
    if "vocabulary" in trained:  # a language task takes its text's, and the cut-offs below it
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
    recipe = run.recipe() if run.exists() else None
    of_run = config_without_incidentals(run) if run.exists() and file in (run.model_path, run.best_path) else None
    return InitialWeights(str(file), digest(file), model, recipe, differs, of_run)


def config_without_incidentals(run: Run) -> dict[str, Any]:
    """What a run is made of, without its seed, what is incidental and what only its test reads.

    Runs that share it differ in their seeds, and so may the runs that they start from.
    """
    config, start = run.config(), run.start()
    task = task_class(config.task.kind)
    tested = {f"task.{name}" for name in {*task.evaluated_by("test")} - {*task.evaluated_by("val")}}
    found = _without(config.to_dict(), incidental_fields(config) | tested | {"loop.seed"})
    for name in STARTS:
        if found["task"].get(name) is not None and start is not None:  # without a record there is only the path
            trained, sha256 = start.get("trained"), f"sha256 {start['sha256'][:16]}"
            found["task"][name] = {"file": Path(start["file"]).name, **trained} if trained else sha256
    return found


def _without(data: Mapping[str, Any], names: set[str], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in data.items()
        if prefix + name not in names
    }


def _read(file: Path) -> tuple[str | None, dict[str, Any]]:
    """Class and configuration of the model; published weights tell neither. What a mitigation learnt is refused."""
    if file.suffix != ".safetensors":
        return None, {}
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata, names = opened.metadata() or {}, list(opened.keys())
        trained = json.loads(metadata.get(CONFIG_KEY, "{}"))
    except (SafetensorError, ValueError) as error:
        raise AcutanceError(f"{file} is not a safetensors file, or it is damaged: {error}") from error
    if learnt := [name for name in names if ".mitigation." in name]:
        raise AcutanceError(
            f"{file} was trained with {trained.get('mitigation') or 'a mitigation'} and holds what that learnt "
            f"({learnt[0]}); a run starts from plain weights only. An eigen is put into them by acutance.fold; with "
            "another mitigation, go on with its own run (--resume --set loop.epochs=…)"
        )
    return metadata.get(CLASS_KEY, "ViT") if trained else None, trained


def _missing(field: str, file: Path) -> AcutanceError:
    if file.is_dir():
        run = Run(file)
        inside = run.model_path if run.exists() else file / "….safetensors"
        return AcutanceError(f"{file} is a folder: name the file, --set task.{field}={inside}")
    run = Run(file.parent)
    advice = f"its run is not finished. {run.how_to_go_on()}" if run.exists() else "train it first, or name another"
    return AcutanceError(f"there is no {file} to start from (task.{field}): {advice}")


def shown(value: Any) -> str:
    """A value in a message."""
    return "none" if value is None else str(value)
