"""The Hugging Face Hub: asked once whether it answers, and its many errors told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from acutance.errors import AcutanceError, first_line

PATIENCE = 10  # seconds


@contextmanager
def loading(name: str, repository: str | None) -> Iterator[None]:
    """Load inside; whatever goes wrong becomes one line, with its cause kept.

    The Hub's client would ask an unreachable Hub six times for every file, for half a minute each. Here it is asked
    once; if it does not answer, only what was downloaded before is read.

    Args:
        name: the model as the user wrote it.
        repository: its name on the Hub; None for local files, which are read without asking anybody.
    """
    silence = _silence(repository) if repository is not None else None
    try:
        with _offline(silence is not None):
            yield
    except AcutanceError:
        raise
    except Exception as error:  # whatever a network or a damaged file provokes
        raise AcutanceError(_explained(name, repository, error, silence)) from error


def _silence(repository: str) -> Exception | None:
    """Why the Hub does not answer; None when it does, be it to say that there is no such model."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(repository, timeout=PATIENCE)
    except (RepositoryNotFoundError, HFValidationError):
        return None  # loading will find out, and say so
    except Exception as error:  # no name service, no route, no answer in time, a proxy's page, offline mode
        return error
    return None


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """The Hub's offline mode, which its environment variable sets only at import."""
    if not wanted:
        yield
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _explained(name: str, repository: str | None, error: Exception, silence: Exception | None) -> str:
    if repository is not None:
        from huggingface_hub import constants, errors

        kinds = {type(cause) for cause in _causes(error)}
        if _any(kinds, errors.GatedRepoError):
            terms = f"{constants.ENDPOINT}/{repository}"
            return f"{name} is gated: accept its terms at {terms}, then log in with `hf auth login`"
        if _any(kinds, errors.RepositoryNotFoundError):
            return f"{name}: there is no public model {repository!r} on the Hub, and no such file or folder here"
        if silence is not None and (_any(kinds, errors.LocalEntryNotFoundError) or _any(kinds, FileNotFoundError)):
            return (
                f"{name} cannot be downloaded: {constants.ENDPOINT} does not answer ({first_line(silence)}). "
                f"It was not downloaded before, and there is no file or folder {repository!r} here"
            )
    return f"{name} cannot be loaded: {first_line(error)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _any(kinds: set[type], wanted: type) -> bool:
    return any(issubclass(kind, wanted) for kind in kinds)
