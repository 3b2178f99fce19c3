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
    once; if it does not answer, only what was downloaded before is read. Local files have no `repository`.
    """
    from huggingface_hub import constants

    silence = None if repository is None else _silence(repository)
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or silence is not None  # its environment variable is read at import only
    try:
        yield
    except AcutanceError:
        raise
    except Exception as error:  # whatever a network or a damaged file provokes
        raise AcutanceError(f"{name} {_reason(repository, error, silence)}") from error
    finally:
        constants.HF_HUB_OFFLINE = offline


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


def _reason(repository: str | None, error: Exception, silence: Exception | None) -> str:
    from huggingface_hub import constants, errors

    causes: list[BaseException] = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)

    def is_caused_by(*kinds: type[BaseException]) -> bool:
        return repository is not None and any(isinstance(cause, kinds) for cause in causes)

    if is_caused_by(errors.GatedRepoError):
        terms = f"{constants.ENDPOINT}/{repository}"
        return f"is gated: accept its terms at {terms}, then log in with `hf auth login`"
    if is_caused_by(errors.RepositoryNotFoundError):
        return f"is not there: no public model {repository!r} on the Hub, and no such file or folder here"
    if silence is not None and is_caused_by(errors.LocalEntryNotFoundError, FileNotFoundError):
        return (
            f"cannot be downloaded: {constants.ENDPOINT} does not answer ({first_line(silence)}). "
            f"It was not downloaded before, and there is no file or folder {repository!r} here"
        )
    return f"cannot be loaded: {first_line(error)}"
