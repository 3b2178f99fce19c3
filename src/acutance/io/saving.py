"""save and load: a model on disk together with the mitigation it carries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn

from acutance import sites
from acutance.errors import AcutanceError, MissingExtraError
from acutance.files.atomic import atomic_write
from acutance.models import LanguageModel, Segmenter, ViT
from acutance.models.checkpoint import CONFIG_KEY, from_checkpoint, save_checkpoint, sort_metadata
from acutance.sites.huggingface_notes import NOTE, forget, is_pretrained, note_when_saving
from acutance.sites.mitigate import reinstate

RECORD_KEY = "acutance.mitigations"  # in the safetensors metadata; transformers' config.json has it too


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write a model's weights, learnt parameters of its mitigation included, and what mitigation it carries.

    Args:
        model: any model; parameters that are shared are written once.
        path: a folder for transformers' models, which are written by their `save_pretrained`; a file
            `….safetensors` for all others. Acutance's own models keep their configuration in it too.
    """
    if is_pretrained(model):
        if Path(path).is_file():  # transformers would log that, and write nothing
            raise AcutanceError(f"{path} is a file: a {type(model).__name__} is written as a folder, name another")
        note_when_saving()
        model.save_pretrained(path)  # type: ignore[operator]
        return Path(path)
    if Path(path).suffix != ".safetensors":
        raise AcutanceError(f"{path}: a {type(model).__name__} is written as one file, name it ….safetensors")
    if isinstance(model, (ViT, LanguageModel)) or (isinstance(model, Segmenter) and model.is_uniform):
        return save_checkpoint(model, path)
    metadata = {"format": "pt", RECORD_KEY: json.dumps(sites.record(model))}

    def write(file: Path) -> None:
        save_model(model, str(file), metadata)
        sort_metadata(file)

    return atomic_write(path, write)


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read what `save` wrote, or transformers' `save_pretrained` of a mitigated model.

    Args:
        path: the folder or file; of a run's folder, its last model.
        model: a plain model to put the mitigation and the weights into. Not needed for transformers' folders and
            Acutance's own models, which say what they are.
    """
    where = Path(path)
    if (where / "config.json").is_file():
        return _load_folder(where, model)
    where = where / "model.safetensors" if where.is_dir() else where  # of a run, or of `acutance mitigate --out`
    metadata = _metadata(where)
    if model is None:
        if CONFIG_KEY not in metadata:
            raise AcutanceError(f"{where} does not say what model it is: build a plain one and pass it as model=")
        return from_checkpoint(where)
    reinstate(model, _checked(metadata.get(RECORD_KEY, "{}"), where))
    try:
        load_model(model, where)
    except (RuntimeError, SafetensorError) as error:
        raise AcutanceError(f"{where} does not fit this {type(model).__name__}: {error}") from error
    return model


def _load_folder(folder: Path, model: nn.Module | None) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"{folder} is a transformers folder: pip install 'acutance[hf]'") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    if model is None:
        names = config.architectures or []
        found = getattr(transformers, names[0], None) if names else None
        if found is None:
            raise AcutanceError(f"{folder} does not say what class it is: build the model and pass it as model=")
        with _expecting_learnt(found):
            model = found.from_pretrained(folder)
    state = _folder_state(folder)
    record = _whole_record(model, getattr(config, NOTE, {}), folder)
    learnt = {name: tensor for name, tensor in state.items() if ".mitigation." in name}
    if learnt and not record:
        raise AcutanceError(
            f"{folder} has parameters of a mitigation ({next(iter(learnt))}), but config.json does not say which. Save "
            "with acutance.save(model, folder)"
        )
    reinstate(model, record)
    names = _names_on_disk(model, [name for name in model.state_dict() if ".mitigation." in name])
    missing = [name for name, written in names.items() if written not in learnt]
    if missing:
        raise AcutanceError(f"{folder} lacks the mitigation's parameters {', '.join(missing[:3])}")
    model.load_state_dict({name: learnt[written] for name, written in names.items()}, strict=False)
    forget(model.config)  # the model itself tells now
    return model


def _names_on_disk(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Transformers 5 writes the modules of some models, such as ViT, under the names they used to have."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {name: name for name in names}
    numbered = {name: torch.tensor(place) for place, name in enumerate(names)}
    written = revert_weight_conversion(cast(Any, model), numbered)
    return {names[int(place)]: name for name, place in written.items()}


@contextmanager
def _expecting_learnt(kind: Any) -> Iterator[None]:
    """What a mitigation learnt is read here, once its places are there; transformers would report it as unexpected."""
    name = "_keys_to_ignore_on_load_unexpected"
    own, inherited = name in vars(kind), getattr(kind, name, None)
    setattr(kind, name, [*(inherited or ()), r"\.mitigation\."])
    try:
        yield
    finally:
        if own:
            setattr(kind, name, inherited)
        else:
            delattr(kind, name)


def _whole_record(model: nn.Module, noted: Mapping[str, Mapping[str, str]], folder: Path) -> dict[str, str]:
    """What was noted by class, with paths from the model: a part that was mitigated by itself has its own class."""
    record: dict[str, str] = {}
    for kind, specs in noted.items():
        found = [path for path, module in model.named_modules() if type(module).__name__ == kind]
        if not found:
            raise AcutanceError(
                f"{folder} was saved from a {kind}, with its mitigation, and this {type(model).__name__} does not hold "
                "one: load the whole with acutance.load(folder) and take its part, or save that part by itself"
            )
        if len(found) > 1:
            raise AcutanceError(
                f"{folder} was saved from a {kind}, with its mitigation, of which this {type(model).__name__} holds "
                f"{len(found)} ({', '.join(found)}): load into one of them"
            )
        prefix = f"{found[0]}." if found[0] else ""
        record |= {prefix + name: spec for name, spec in _checked(json.dumps(specs), folder).items()}
    return record


def _folder_state(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def _metadata(file: Path) -> Mapping[str, str]:
    if not file.is_file():
        raise AcutanceError(f"there is no file {file}")
    try:
        with safe_open(str(file), framework="pt") as opened:
            return opened.metadata() or {}
    except SafetensorError as error:
        raise AcutanceError(f"{file} is not a safetensors file, or it is damaged: {error}") from error


def _checked(text: str, source: Path) -> dict[str, str]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise AcutanceError(f"{source}: its record of mitigations is damaged: {error}") from error
    if not isinstance(record, dict) or not all(isinstance(spec, str) for spec in record.values()):
        raise AcutanceError(f"{source}: its record of mitigations is not a table of specs: {record!r}")
    return record
