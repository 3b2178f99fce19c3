"""Models by name, as the command line takes them: of transformers, of timm, and checkpoints and runs of our own."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from acutance.errors import AcutanceError, MissingExtraError, first_line, import_extra, warn
from acutance.io.inputs import Batches, LoadedModel, centre_crop, of_dtype
from acutance.io.saving import listed, load
from acutance.measure.samples import fed_of, refuse_single
from acutance.models import LanguageModel
from acutance.sites.transformers import notes_of

DTYPES = ("float32", "float64", "bfloat16", "float16")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as DeiT's
PATIENCE = 10  # seconds that the Hub has to answer in


def load_model(
    name: str, *, head: bool = False, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None
) -> LoadedModel:
    """A pretrained model and what is needed to feed it, on a device; weights stay as they are stored without `dtype`.

    The name is `hf:` and a model on the Hugging Face Hub, a folder or a GGUF file; `timm:` and a pretrained model's
    name or a folder; `module:` and the path of a function of your own that returns a model, or (model, batches); or the
    path of a checkpoint or run of our own. With `head` a model of `hf:` is the whole that its
    checkpoint was saved from (for generating, training, saving again) instead of the bare backbone, which is all that
    measuring needs and cheaper to run. Others are always whole.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise AcutanceError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if name in ("", "hf:", "timm:"):  # an empty path is the current folder
        raise AcutanceError(f"{name!r} names no model: write hf:NAME, timm:NAME or the path of a checkpoint or run")
    if name.startswith("hf:"):
        loaded = _transformers(name, head)
    elif name.startswith("module:"):
        loaded = _module(name)
    else:
        loaded = _timm(name) if name.startswith("timm:") else _own(Path(name))
    loaded.model.to(device=device, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return loaded


def refuse_unsavable(name: str, out: Path) -> None:
    """Refuse a model by its name that could not be written to `out`, before it is loaded."""
    if out.is_file():
        raise AcutanceError(f"{out} is a file: name a folder to save the model in")
    if name.startswith("hf:") and "gguf_file" in _source(name)[1]:
        raise AcutanceError(f"{name} is a GGUF file, which transformers reads but cannot save: leave out --out {out}")


def _own(path: Path) -> LoadedModel:
    """A checkpoint of our own, or the one in a run's folder."""
    if (path / "config.json").is_file():
        raise AcutanceError(f"{path} is a folder of transformers: write hf:{path}")
    # What lab knows of runs and of the digits. The core does not import lab, so it is found by an entry point.
    plugins = [found.load() for found in entry_points(group="acutance.loaders")]
    checkpoint = path / "model.safetensors" if path.is_dir() else path
    if not checkpoint.is_file():
        for plugin in plugins:
            plugin.refuse_unfinished(checkpoint)
        elsewhere = f"; a model of transformers is written hf:{path}, one of timm timm:{path}"
        elsewhere = "" if path.is_dir() else f"{elsewhere}, one of your own module:file.function"
        raise AcutanceError(f"no checkpoint at {checkpoint}{elsewhere}; `acutance demo` writes some to try")
    model: Any = load(checkpoint)

    def preprocess(images: Any) -> Any:
        if (channels := model.config.in_chans) != 3:
            raise AcutanceError(f"--images takes colour images, the model has {channels} channels: use Python")
        return centre_crop((model.config.image_size,) * 2, MEAN, STD, fraction=224 / 256)(images)

    data = {name: own for plugin in plugins for name, own in plugin.data_of(path, model).items()}
    # A language model's words are a corpus's, which the file does not have: it reads its run's data alone.
    return LoadedModel(str(path), model, preprocess=None if isinstance(model, LanguageModel) else preprocess, data=data)


def _module(name: str) -> LoadedModel:
    """What the user's own function returns: a model, or a model and its batches, which are kept in memory."""
    path, _, function = name.removeprefix("module:").replace(":", ".").rpartition(".")
    with patch.object(sys, "path", [str(Path.cwd()), *sys.path]):  # an installed command does not look there
        try:
            make = getattr(importlib.import_module(path), function)
        except (ImportError, AttributeError, ValueError) as error:
            advice = "write module:file.function, of a file in this folder or an installed module"
            raise AcutanceError(f"{name} cannot be imported: {first_line(error)}; {advice}") from error
        made = make()
    model, batches = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise AcutanceError(f"{name} must return a model, or (model, batches), not a {type(model).__name__}")

    def own(*, limit: int | None = None, batch: int | None = None, data_dir: object = None) -> Batches:
        if (limit, batch, data_dir) != (None, None, None):
            raise AcutanceError(f"{name} makes its own batches: leave out --limit, --batch and --data-dir")
        refuse_single(batches)
        dtype = next(model.parameters()).dtype
        given = list(batches or ())
        return Batches(given, 1, f"{len(given)} batches of {name}", lambda one: of_dtype(fed_of(one[0]), dtype))

    return LoadedModel(name, model, data={} if batches is None else {"own": own})


def _transformers(name: str, head: bool) -> LoadedModel:
    """The model behind `hf:…`: its backbone, or with `head` the class its checkpoint was saved from."""
    transformers = import_extra("transformers", "hf: models need transformers: pip install 'acutance[hf]'")
    place, options, repository = _source(name)
    with _loading(name, repository):
        config = transformers.AutoConfig.from_pretrained(place, **options)
        if notes_of(config):  # saved with its mitigation, whose record names layers of the whole
            from huggingface_hub import snapshot_download

            model: Any = load(place if repository is None else snapshot_download(repository))
        else:
            # A GGUF file does not name the class it was saved from; it holds a language model.
            whole = transformers.AutoModelForCausalLM if "gguf_file" in options else transformers.AutoModel
            whole = getattr(transformers, (config.architectures or [""])[0], whole)
            kind = whole if head else transformers.AutoModel
            model, report = kind.from_pretrained(place, config=config, output_loading_info=True, **options)
            # Poolers are left out: nothing after them is measured, and checkpoints often come without.
            if random := sorted(key for key in report["missing_keys"] if "pooler" not in key.split(".")):
                warn(f"{name} holds no {listed(random, 4)}: random there, as in an untrained model", stacklevel=4)

    def part(kind: Any, what: str, **options: Any) -> Any:
        with _loading(f"the {what} of {name}", repository):
            return kind.from_pretrained(place, **options)

    @cache
    def tokenizer() -> Any:
        found = part(transformers.AutoTokenizer, "tokenizer", config=config, **options)
        if len(found) <= len(found.all_special_tokens):  # the library makes an empty one where there is none
            raise AcutanceError(f"{name} comes without a tokenizer's vocabulary, such as tokenizer.json: put it there")
        return found

    # PIL's gives the same pictures with and without torchvision.
    processor = cache(lambda: part(transformers.AutoImageProcessor, "image processor", backend="pil"))

    def preprocess(images: Any) -> Any:
        return dict(processor()(images=list(images), return_tensors="pt"))

    inputs, text = signature(model.forward).parameters, config.get_text_config(decoder=True)
    places = (text, config, getattr(model, "generation_config", None))
    starts = (getattr(place, "decoder_start_token_id", None) for place in places)
    # As configured, or padding, which is what T5 starts from.
    start = next((token for token in starts if token is not None), getattr(text, "pad_token_id", None) or 0)
    return LoadedModel(
        name,
        model,
        tokenizer=tokenizer if "input_ids" in inputs else None,
        preprocess=preprocess if "pixel_values" in inputs else None,
        save_inputs=lambda folder, text: (tokenizer if text else processor)().save_pretrained(folder),
        context=_context(model, config),
        decoder_start=start if "decoder_input_ids" in inputs else None,
    )


def _source(name: str) -> tuple[str, dict[str, str], str | None]:
    """A folder or a name on the Hub, options for from_pretrained, and the repository on the Hub, if it is one."""
    place = name.removeprefix("hf:")
    path = Path(place).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if path.is_dir() and (not files or (path / "config.json").is_file()):
        return str(path), {}, None
    if len(files) > 1:
        raise AcutanceError(f"{name} holds several GGUF files ({listed([f.name for f in files])}): name one of them")
    if (file := next(iter(files), None)) is not None:
        if file.suffix != ".gguf":
            raise AcutanceError(f"{name} is a file, but no GGUF: name the folder with config.json and the weights")
        if missing := [library for library in ("gguf", "accelerate") if importlib.util.find_spec(library) is None]:
            raise MissingExtraError(f"a GGUF file needs {' and '.join(missing)}: pip install 'acutance[hf]'")
        return str(file.parent), {"gguf_file": file.name}, None
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place):
        raise AcutanceError(f"{name}: there is no file or folder {path}, and a name on the Hub looks like owner/model")
    return place, {}, place


def _context(model: nn.Module, config: Any) -> int | None:
    """The most tokens a text may have; None where the configuration names no bound, or −1 as XLNet's does."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or positions <= 0:
        return None
    for name, table in model.named_modules():
        # RoBERTa and its kin number positions from behind the padding token's number. The tables of BART and OPT have
        # two more rows instead, which their configurations do not count.
        padding = getattr(table, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None and len(table.weight) == positions:
            return positions - int(padding) - 1
    return positions


def _timm(name: str) -> LoadedModel:
    try:
        timm = import_extra("timm", "timm: models need timm: pip install 'acutance[timm]'")
    except RuntimeError as error:  # how torchvision says that it was built for another torch
        raise AcutanceError(f"timm cannot be imported beside this torchvision and torch: {error}") from error
    wanted = name.removeprefix("timm:")
    here, repository = Path(wanted).expanduser(), None  # of the weights on the Hub; they may come from elsewhere
    if here.is_dir():
        wanted = f"local-dir:{here}"
    elif wanted.startswith("hf-hub:"):
        repository = wanted.removeprefix("hf-hub:")
    elif not timm.is_model(wanted.split(".")[0]):
        close = get_close_matches(wanted, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise AcutanceError(f"{name}: timm {timm.__version__} knows no such model, and there is no such folder{hint}")
    elif wanted not in timm.list_pretrained() and not timm.models.is_model_pretrained(wanted):
        raise AcutanceError(f"{name}: timm {timm.__version__} has no pretrained weights under this name")
    else:
        repository = timm.models.get_pretrained_cfg(wanted).hf_hub_id
    with _loading(name, repository):
        model = timm.create_model(wanted, pretrained=True)

    def preprocess(images: Any) -> torch.Tensor:
        config = timm.data.resolve_model_data_config(model)
        # The configuration may have the size of the weights that the model was made from.
        if getattr(patches := getattr(model, "patch_embed", model), "strict_img_size", False) and patches.img_size:
            config["input_size"] = (config["input_size"][0], *patches.img_size)
        return torch.stack([*map(timm.data.create_transform(**config), images)])

    return LoadedModel(name, model, preprocess=preprocess)


@contextmanager
def _loading(name: str, repository: str | None) -> Iterator[None]:
    """Load inside; whatever goes wrong becomes one line, with its cause kept. Local files have no `repository`.

    The Hub's client would ask an unreachable Hub six times for every file, for half a minute each. Here it is asked
    once; if it does not answer, only what was downloaded before is read. Load reports of transformers are not shown,
    and its bars only while something is downloaded.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    silence: Exception | None = None  # why the Hub does not answer
    try:
        if repository is not None:
            HfApi().model_info(repository, timeout=PATIENCE)
    except Exception as error:  # no name service, no route, no answer in time, a proxy's page, offline mode
        if not isinstance(error, (RepositoryNotFoundError, HFValidationError)):  # of which loading will say so
            silence = error
    with ExitStack() as stack:
        # Its environment variable is read at import only.
        stack.enter_context(patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or silence is not None))
        if (log := sys.modules.get("transformers.utils.logging")) is not None:
            stack.callback(log.set_verbosity, log.get_verbosity())
            log.set_verbosity_error()
            if repository is None and log.is_progress_bar_enabled():
                stack.callback(log.enable_progress_bar)
                log.disable_progress_bar()
        try:
            yield
        except AcutanceError:
            raise
        except Exception as error:  # whatever a network or a damaged file provokes
            raise AcutanceError(f"{name} {_reason(repository, error, silence)}") from error


def _reason(repository: str | None, error: BaseException, silence: Exception | None) -> str:
    from huggingface_hub import constants, errors

    cause, hub = error if repository is not None else None, constants.ENDPOINT
    while cause is not None:
        if isinstance(cause, errors.GatedRepoError):
            return f"is gated: accept its terms at {hub}/{repository}, then log in with `hf auth login`"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return f"is not there: no public model {repository!r} on the Hub, and no such file or folder here"
        if silence is not None and isinstance(cause, FileNotFoundError):  # of the Hub's client too
            return f"cannot be downloaded: {hub} does not answer ({first_line(silence)}), and no copy of it is here"
        cause = cause.__cause__ or cause.__context__
    return f"cannot be loaded: {first_line(error)}"
