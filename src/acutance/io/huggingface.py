"""Models of Hugging Face transformers: from the Hub, from a folder, from a GGUF file."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from acutance.errors import AcutanceError, AcutanceWarning, MissingExtraError
from acutance.io.hub import loading
from acutance.io.inputs import LoadedModel
from acutance.io.saving import load as load_saved
from acutance.sites.transformers import notes_of

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(NamedTuple):
    """Where a model lies."""

    place: str  # a folder, or a name on the Hub
    options: Mapping[str, str] = {}  # what the library's from_pretrained must be told beside it
    repository: str | None = None  # the name on the Hub; None for local files


def load(name: str, *, head: bool) -> LoadedModel:
    """The model behind `hf:…`: its backbone, or with `head` the class its checkpoint was saved from."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("hf: models need transformers: pip install 'acutance[hf]'") from error
    source = _source(name)
    with loading(name, source.repository), _quiet(transformers, source.repository is None):
        config = transformers.AutoConfig.from_pretrained(source.place, **source.options)
        if notes_of(config):  # it was saved with its mitigation, whose record names layers of the whole
            model = _mitigated(source)
        else:
            kind = _class(transformers, config, source) if head else transformers.AutoModel
            options = {"config": config, "output_loading_info": True, **source.options}
            model, report = kind.from_pretrained(source.place, **options)
            _warn_of_random_weights(name, report["missing_keys"])

    @cache
    def tokenizer() -> Any:
        with loading(f"the tokenizer of {name}", source.repository), _quiet(transformers, True):
            found = transformers.AutoTokenizer.from_pretrained(source.place, config=config, **source.options)
        if len(found) <= len(found.all_special_tokens):  # the library makes an empty one where there is none
            raise AcutanceError(f"{name} comes without a tokenizer's vocabulary, such as tokenizer.json: put it there")
        return found

    @cache
    def processor() -> Any:
        with loading(f"the image processor of {name}", source.repository), _quiet(transformers, True):
            # The PIL back-end gives the same pictures with and without torchvision.
            found: Any = transformers.AutoImageProcessor
            return found.from_pretrained(source.place, backend="pil")

    inputs = signature(model.forward).parameters
    return LoadedModel(
        name,
        model,
        tokenizer=tokenizer if "input_ids" in inputs else None,
        preprocess=(lambda: partial(_prepare, processor())) if "pixel_values" in inputs else None,
        save_inputs=lambda folder, text: (tokenizer if text else processor)().save_pretrained(folder),
        context=_context(model, config),
        decoder_start=_decoder_start(model, config),
    )


def _prepare(processor: Any, images: Sequence[Any]) -> dict[str, Any]:
    return dict(processor(images=list(images), return_tensors="pt"))


def _source(name: str) -> Source:
    place = name.removeprefix("hf:")
    path = Path(place).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file() or not found:
            return Source(str(path))
        if len(found) > 1:
            files = ", ".join(file.name for file in found)
            raise AcutanceError(f"{name} holds several GGUF files ({files}): name one of them")
        path = found[0]
    if path.is_file():
        if path.suffix != ".gguf":
            raise AcutanceError(
                f"{name} is a file, but no .gguf file: name the folder with config.json and the weights"
            )
        missing = [library for library in ("gguf", "accelerate") if importlib.util.find_spec(library) is None]
        if missing:
            raise MissingExtraError(f"a GGUF file needs {' and '.join(missing)}: pip install 'acutance[hf]'")
        return Source(str(path.parent), {"gguf_file": path.name})
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(place):
        raise AcutanceError(f"{name}: there is no file or folder {path}, and a name on the Hub looks like owner/model")
    return Source(place, repository=place)


def _class(transformers: Any, config: Any, source: Source) -> Any:
    """The class the checkpoint was saved from. A GGUF file does not say; it holds a language model."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is not None:
        return named
    return transformers.AutoModelForCausalLM if "gguf_file" in source.options else transformers.AutoModel


def _mitigated(source: Source) -> Any:
    if source.repository is None:
        return load_saved(source.place)
    from huggingface_hub import snapshot_download

    return load_saved(snapshot_download(source.repository))


def _warn_of_random_weights(name: str, missing: set[str]) -> None:
    """A pooler stands after everything that is measured, and checkpoints often come without."""
    random = sorted(key for key in missing if "pooler" not in key.split("."))
    if random:
        shown = ", ".join(random[:4]) + (f" and {len(random) - 4} more" if len(random) > 4 else "")
        warnings.warn(f"{name} holds no {shown}: random there, as in an untrained model", AcutanceWarning, stacklevel=4)


def _context(model: nn.Module, config: Any) -> int | None:
    """The most tokens a text may have; None where the configuration names no bound, or −1 as XLNet's does."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or positions <= 0:
        return None
    for name, table in model.named_modules():
        # RoBERTa and its kin count from behind the padding's number: the rows up to it are no token's. The tables of
        # BART and OPT have two rows more instead, which their configurations do not count.
        padding = getattr(table, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None and len(table.weight) == positions:
            return positions - int(padding) - 1
    return positions


def _decoder_start(model: nn.Module, config: Any) -> int | None:
    """The token a decoder starts from: as configured, or padding, which is what T5 starts from."""
    if not config.is_encoder_decoder or "decoder_input_ids" not in signature(model.forward).parameters:
        return None
    text = config.get_text_config(decoder=True)
    places = (text, config, getattr(model, "generation_config", None))
    found = [getattr(place, "decoder_start_token_id", None) for place in places]
    start: int = next((token for token in found if token is not None), text.pad_token_id or 0)
    return start


@contextmanager
def _quiet(transformers: Any, bars_too: bool) -> Iterator[None]:
    """Without the library's load reports; its bars are wanted only while something is downloaded."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    if bars_too:
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
