"""Options that several commands share, and what commands print."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import acutance as ac
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write


def option(help: str, *names: str, **more: Any) -> Any:
    """An option with its help text."""
    return typer.Option(*names, help=help, **more)


_MODEL = "hf: and a model on the Hugging Face Hub, a folder or a GGUF file; timm: and a pretrained model or a folder; "
_MODEL += "module: and a function of your own that returns a model, or (model, batches); "
_MODEL += "a checkpoint written by Acutance (model.safetensors), or the folder of a run."
Model = Annotated[str, typer.Argument(help=_MODEL)]
DataDir = Annotated[Path | None, option("Where the data is now, if not where it was.")]
Device = Annotated[str, option("cpu, cuda or auto.")]
Part = Annotated[str | None, option("The stack of layers to read, e.g. encoder.")]
LIBRARIES = ("hf:", "timm:")  # whose models bring no data of their own
JSON = Annotated[Path | None, option("Also write the result here.", "--json")]
HTML = Annotated[Path | None, option("Also write an offline page here.", "--html")]

console = Console(emoji=False)  # timm:tm: would become a trade mark
say = partial(console.out, highlight=False)  # text as it is: no markup, no wrapping


@dataclass(frozen=True)
class DataOptions:
    """What a model reads, and how it is computed."""

    text: Annotated[Path | None, option("Read this text file, or the .txt files of a folder.")] = None
    images: Annotated[Path | None, option("Read the images of this folder and its subfolders.")] = None
    data_dir: DataDir = None
    tokens: Annotated[int | None, option("Length of a window; by default the context, 512 at most.", min=1)] = None
    batch: Annotated[int | None, option("Samples per batch.", min=1)] = None
    limit: Annotated[int | None, option("Stop after so many windows or images.", min=1)] = None
    device: Device = "auto"
    dtype: Annotated[str | None, option("float32, float64, bfloat16 or float16.")] = None

    def check(self, model: str, *, reads: bool = True) -> None:
        """Refuse what cannot work before anything is loaded."""
        for option, path in (("--text", self.text), ("--images", self.images)):
            if path is not None and not path.exists():
                raise AcutanceError(f"{option} {path}: there is no such file or folder")
        if self.images is not None and not self.images.is_dir():
            raise AcutanceError(f"--images {self.images} is a file: name the folder that it is in")
        if self.tokens is not None and self.text is None:
            raise AcutanceError("--tokens is the length of a window of text: it needs --text FILE")
        if reads and model.startswith(LIBRARIES) and self.text is self.images is None:
            raise AcutanceError(f"{model} comes without data: say what it shall read with --text FILE or --images DIR")

    def load(self, model: str, *, reads: bool = True, **more: Any) -> Any:
        self.check(model, reads=reads)
        import torch

        from acutance.distributed import device

        torch.manual_seed(0)  # the same command writes the same file
        return ac.io.load_model(model, device=device(self.device), dtype=self.dtype, **more)

    def batches(self, loaded: Any, data: str | None = None) -> Any:
        """What the model reads; by default a run's own test data, or else the embedded digits."""
        if sum(given is not None for given in (data, self.text, self.images)) > 1:
            raise AcutanceError("--data, --text and --images each say what to read: give one of them")
        if data not in (None, "digits", "own"):
            raise AcutanceError(f"--data takes digits or own, not {data!r}; other data come by --text or --images")
        if data == "own" and data not in loaded.data:
            raise AcutanceError(f"--data own: {loaded.name} is no run of `acutance train` with test data of its own")
        name = data or next(iter(loaded.data), None)
        if self.data_dir is not None and (self.text or self.images or name != "own"):
            raise AcutanceError(f"--data-dir says where a run's own data lies, which {loaded.name} is not to read")
        how = {"limit": self.limit} | ({} if self.batch is None else {"batch": self.batch})
        if self.text is not None:
            return loaded.text_batches(self.text, tokens=self.tokens, **how)
        if self.images is not None:
            return loaded.image_batches(self.images, **how)
        if name in loaded.data:
            return loaded.data[name](data_dir=self.data_dir, **how)
        options = {"--text FILE": loaded.tokenizer, "--images DIR": loaded.preprocess}
        other = "(model, batches) from it" if loaded.name.startswith("module:") else "ac.measure(model, batches)"
        wanted = " or ".join(option for option, reads in options.items() if reads) or other
        raise AcutanceError(f"{loaded.name} does not take the embedded digits: say what it shall read with {wanted}")


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its argument `options`, a dataclass, replaced by the options that are its fields."""
    own = dict(inspect.signature(command).parameters)
    group = own.pop("options").annotation
    shared = inspect.signature(group).parameters

    @wraps(command)
    def run(**given: Any) -> None:
        command(options=group(**{name: given.pop(name) for name in shared}), **given)

    every = (parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*shared.values(), *own.values()))
    run.__signature__ = inspect.Signature(list(every))  # type: ignore[attr-defined]
    return run


def words(text: str) -> list[str]:
    """What stands between commas, with blanks after them or without."""
    return [word.strip() for word in text.split(",")]


def ints(text: str, option: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        return [int(number) for number in words(text)]
    except ValueError as error:
        raise AcutanceError(f"{option} takes numbers with commas between, such as 1,6,12, not {text!r}") from error


def write(path: Path | None, content: bytes | Callable[[Path], object]) -> None:
    """Write a file that was asked for, and say so."""
    if path is not None:
        say(f"wrote {atomic_write(path, content)}")
