"""The errors and warnings Acutance raises on purpose; each message says what to do."""

import importlib
import warnings
from typing import Any

# Where attention cannot be read.
TOKENS_REMAIN = "Token metrics can still be measured: measure(model, batches) with its default metrics and tap"


class AcutanceError(Exception):
    """Something was asked for that cannot be answered truthfully."""


class ShapeError(AcutanceError, ValueError):
    """A tensor has the wrong shape; the message prints the shapes."""


class SignedRowsError(AcutanceError):
    """The rows of an operator are no weights that sum to one, as a metric needs them."""


class NonFiniteError(AcutanceError, ValueError):
    """A NaN or an infinity where a metric needs numbers."""


class MissingExtraError(AcutanceError, ImportError):
    """An optional library is needed; the message names the extra that installs it."""


class AcutanceWarning(UserWarning):
    """A result stands, but the reader should know something about it."""


def warn(message: str, stacklevel: int = 3) -> None:
    """Warn as this library, at the line that called the caller; higher levels are further out."""
    warnings.warn(message, AcutanceWarning, stacklevel)


class NoSitesError(AcutanceError):
    """No attention was found that could be mitigated or read; tokens can be measured all the same."""


class SeveralStacksError(AcutanceError):
    """A model has several stacks of layers, such as an encoder and a decoder; `parts` are the paths to choose from."""

    def __init__(self, message: str, parts: list[str]) -> None:
        super().__init__(message)
        self.parts = parts


def require_finite(x: Any, what: str) -> Any:
    """The tensor, unless it holds a NaN or an infinity: LAPACK may take the interpreter down with it."""
    if not bool(x.isfinite().all()):
        raise NonFiniteError(f"{what} holds NaN or infinite entries, so nothing can be said of its spectrum")
    return x


def first_line(error: BaseException) -> str:
    """What another library's error says, in short."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def import_extra(module: str, message: str) -> Any:
    """Import an optional library, or raise this message, which says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(message) from error
