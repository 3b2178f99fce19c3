"""Models on disk, together with the mitigations they carry. Nothing is ever unpickled but tensors."""

import json
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn

from acutance import sites
from acutance.errors import AcutanceError, first_line, import_extra
from acutance.files.atomic import atomic_write
from acutance.models import BlockStack, LanguageModel, Segmenter, ViT
from acutance.sites.mitigate import reinstate
from acutance.sites.transformers import is_pretrained, note, notes_of

PICKLES = (".bin", ".ckpt", ".pt", ".pth")
PathLike = str | os.PathLike[str]
OWN: dict[str, Any] = {kind.__name__: kind for kind in (ViT, LanguageModel, Segmenter)}
CONFIG_KEY = "acutance.config"  # in the safetensors metadata
CLASS_KEY = "acutance.model"  # a ViT where it is missing, as in the first files
MODULE = "write a function that builds and loads it, and give that as module:path.to.make_model"
RECORD_KEY = "acutance.mitigations"  # of other models; transformers' config.json has it too
UNEXPECTED = "_keys_to_ignore_on_load_unexpected"  # where a class of transformers lists them


def save(model: nn.Module, path: PathLike) -> Path:
    """Write a model's weights, the mitigation it carries and what that has learnt.

    The path is a folder for transformers' models, which are written by their `save_pretrained`, and a file
    `….safetensors` for all others. Acutance's own models keep their configuration in it too.
    """
    kind = type(model).__name__
    if is_pretrained(model):
        if Path(path).is_file():  # transformers would log that, and write nothing
            raise AcutanceError(f"{path} is a file: a {kind} is written as a folder, name another")
        with ExitStack() as stack:
            stack.callback(note(model))  # of the whole: a part that was mitigated by itself did not know it
            try:
                model.save_pretrained(path)  # type: ignore[operator]
            except ValueError as error:  # such as quantized weights
                raise AcutanceError(f"transformers cannot save this {kind}: {first_line(error)}") from error
        return Path(path)
    if Path(path).suffix != ".safetensors":
        raise AcutanceError(f"{path}: a {kind} is written as one file, name it ….safetensors")
    metadata = {RECORD_KEY: json.dumps(sites.record(model))}
    if type(model) in OWN.values():
        with suppress(AcutanceError):  # layers that differ in their mitigation, which a configuration cannot say
            metadata = {CLASS_KEY: kind, CONFIG_KEY: json.dumps(cast(Any, model).config.to_dict())}

    def write(file: Path) -> None:
        save_model(model, str(file), {"format": "pt", **metadata})
        with file.open("rb+") as opened:  # the library writes metadata in random order; equal models are equal files
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
            text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
            assert len(text) <= size, "the same entries in another order, and spaces"
            opened.seek(8)
            opened.write(text.ljust(size))

    return atomic_write(path, write)


def load(path: PathLike, model: nn.Module | None = None) -> nn.Module:
    """Read what `save` wrote, or transformers' `save_pretrained` of a mitigated model; of a run's folder, its last one.

    Mitigation and weights are put into a plain `model`. Transformers' folders and Acutance's own models need none: they
    say what they are.
    """
    where = Path(path)
    if (where / "config.json").is_file():
        return _load_folder(where, model)
    where = where / "model.safetensors" if where.is_dir() else where  # of a run, or of `acutance mitigate --out`
    if where.suffix in PICKLES and where.is_file():
        raise AcutanceError(_pickled(where))
    with _reading(where), safe_open(str(where), framework="pt") as opened:
        metadata = opened.metadata() or {}
        config, record = (json.loads(metadata.get(key, "{}")) for key in (CONFIG_KEY, RECORD_KEY))
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    outline = None
    if CONFIG_KEY in metadata:
        outline = _outline(metadata.get(CLASS_KEY, "ViT"), config, len(shapes), where)
        record = sites.record(outline)
    if model is not None:
        reinstate(model, _specs(record, where))
    elif outline is not None:
        _refuse_misfit(str(where), shapes, outline)
        model = type(outline)(**config)
    else:
        raise AcutanceError(f"{where} names no model: pass it as model=, use acutance.io.load_checkpoint, or {MODULE}")
    try:
        load_model(model, where)
    except (RuntimeError, SafetensorError) as error:
        raise AcutanceError(f"{where} does not fit this {type(model).__name__}: {error}") from error
    return model


def _pickled(file: Path) -> str:
    """What is in a file of `torch.save`, found without running it, and how to read its model."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file provokes
        kind = re.search(r"GLOBAL (\S+)", str(error))
        if kind is None:
            return f"{file} cannot be read as weights: damaged, or more than tensors. Fetch it again"
        return (
            f"{file} holds an object of {kind[1]}, and unpickling it could run code: save its state dict, and {MODULE}"
        )
    what = "a state dict" if isinstance(state, Mapping) else f"a {type(state).__name__}"
    return f"{file} is {what} of torch.save, which does not say how to build its model: {MODULE}"


def _outline(name: str, options: Mapping[str, Any], tensors: int, where: Path) -> nn.Module:
    """The model on no device: a damaged configuration may ask for any size, and nothing is allocated for it."""
    if (kind := OWN.get(name)) is None:
        raise AcutanceError(f"{where} holds a {name}, which this version does not know; known: {', '.join(OWN)}")
    try:
        if (layers := options.get("depth", 0) + options.get("decoder_depth", 0)) > tensors:
            raise ValueError(f"{layers} layers for {tensors} tensors")
        with torch.device("meta"):
            return cast(nn.Module, kind(**options))
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise AcutanceError(f"{where}: its configuration makes no {name}: {first_line(error)}") from error


def load_checkpoint(model: BlockStack | Segmenter, source: PathLike | Mapping[str, Any]) -> None:
    """Load published weights into one of our models, all of them or none; positions of another grid are resized.

    The source is a safetensors or `.pth` file with a state dict or DeiT's {"model": state dict}, or such a mapping.
    """
    label, state = "the state dict", cast(Any, source)
    if not isinstance(source, Mapping):
        label = str(source)
        with _reading(file := Path(source)):
            is_safe = file.suffix == ".safetensors"
            state = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise AcutanceError(f"{label} holds a {type(state).__name__}, not a state dict")
    state = state["model"] if isinstance(state.get("model"), Mapping) else state
    if other := [str(name) for name, value in state.items() if not isinstance(value, Tensor)]:
        raise AcutanceError(f"{label} is not a state dict: {listed(other)} are no tensors. Pass the state dict itself")
    state = model.fit_state(state)
    # Compared before touching the model: load_state_dict copies what fits even when it then complains.
    _refuse_misfit(label, {name: tuple(value.shape) for name, value in state.items()}, model)
    model.load_state_dict(state)


def _refuse_misfit(label: str, given: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    sizes = [f"{name} {given[name]} for {size}" for name, size in sorted(own.items()) if given.get(name, size) != size]
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    problems = {"missing": missing, "unexpected": unexpected, "of another size": sizes}
    if found := "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names):
        advice = "build the model with the options the weights were trained with"
        if any(".mitigation." in name for name in missing):
            advice = "load it into a plain model, then add the mitigation with mitigate(model, …)"
        raise AcutanceError(f"{label} does not fit the model ({found}). To fix it, {advice}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Read a file inside; whatever goes wrong is said in one line."""
    if not file.is_file():
        raise AcutanceError(f"there is no file {file}")
    try:
        yield
    except Exception as error:  # whatever a damaged or hostile file provokes
        # torch's message about a pickle says how to load it all the same
        reason = "" if isinstance(error, pickle.UnpicklingError) else f" ({first_line(error)})"
        advice = f"unpickling could run code{reason}. Fetch it again, or save its state dict alone"
        raise AcutanceError(f"{file} cannot be read as weights: damaged, or more than tensors, and {advice}") from error


def listed(names: list[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _load_folder(folder: Path, model: nn.Module | None) -> nn.Module:
    transformers = import_extra("transformers", f"{folder} is a transformers folder: pip install 'acutance[hf]'")
    config = transformers.AutoConfig.from_pretrained(folder)
    if model is None:
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None:
            raise AcutanceError(f"{folder} does not say what class it is: build the model and pass it as model=")
        # Transformers would report a mitigation's parameters as unexpected; they are read below.
        ignored = [*(getattr(kind, UNEXPECTED, None) or ()), r"\.mitigation\."]
        with patch.object(kind, UNEXPECTED, ignored):
            model = cast(nn.Module, kind.from_pretrained(folder))
    record = _whole_record(model, notes_of(config), folder)
    states = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    learnt = {name: tensor for state in states for name, tensor in state.items() if ".mitigation." in name}
    if learnt and not record:
        raise AcutanceError(f"{folder} does not say which mitigation has {next(iter(learnt))}: use acutance.save")
    reinstate(model, record)
    names = [name for name in model.state_dict() if ".mitigation." in name]
    # Transformers 5 writes the modules of some models, such as ViT, under the names they used to have.
    library = sys.modules.get("transformers.core_model_loading")
    rename = getattr(library, "revert_weight_conversion", lambda _model, numbered: numbered)
    written = rename(model, {name: torch.tensor(place) for place, name in enumerate(names)})
    if missing := [name for name in written if name not in learnt]:
        raise AcutanceError(f"{folder} lacks the mitigation's parameters {listed(missing, 3)}")
    model.load_state_dict({names[int(place)]: learnt[name] for name, place in written.items()}, strict=False)
    return model


def _whole_record(model: nn.Module, noted: Mapping[str, Mapping[str, str]], folder: Path) -> dict[str, str]:
    """The specs by path from this model. They were noted by class: a part mitigated by itself has its own class."""
    record: dict[str, str] = {}
    for kind, specs in noted.items():
        found = [path for path, module in model.named_modules() if type(module).__name__ == kind]
        body = f"{getattr(model, 'base_model_prefix', '')}."  # of a model with a head, whose configuration it shares
        if not found and all(name.startswith(body) for name in specs):
            found, specs = [""], {name.removeprefix(body): spec for name, spec in specs.items()}
        if len(found) != 1:
            advice = f"load into one of {', '.join(found)}" if found else "load the whole and take its part"
            raise AcutanceError(f"{folder} was saved from a {kind}, not a {type(model).__name__}: {advice}")
        prefix = f"{found[0]}." if found[0] else ""
        record |= {prefix + name: spec for name, spec in _specs(specs, folder).items()}
    return record


def _specs(record: Any, source: Path) -> dict[str, str]:
    if not isinstance(record, dict) or not all(isinstance(spec, str) for spec in record.values()):
        raise AcutanceError(f"{source}: its record of mitigations is not a table of specs: {record!r}")
    return record
