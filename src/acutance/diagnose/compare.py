"""compare: how models, runs and what was measured of them differ."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from acutance.errors import AcutanceError
from acutance.files.atomic import read_bytes
from acutance.io.loading import load_model
from acutance.measure import measure
from acutance.measure.comparison import Comparison, compared
from acutance.measure.profile import Profile


def compare(*what: Any, batches: Iterable[Any] | None = None, **options: Any) -> Comparison:
    """How each differs from the first, layer by layer: a table of differences with intervals, and a sentence.

    Differences are paired over samples where both have read the same ones.

    Args:
        what: two or more profiles, diagnoses or other results with a `profile`, files of these, models, or names of
            models and runs as the command line takes them.
        batches: what models read; those with a name may have data of their own. A list or a DataLoader without
            shuffling: every model reads them.
        options: for `measure`, for example metrics and tap.
    """
    if len(what) < 2:
        raise AcutanceError(f"compare takes two or more profiles, diagnoses, runs or models, got {len(what)}")
    return compared(*(_profile(one, batches, options) for one in what))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file of `save`: of a profile itself, or of a result that holds one."""
    try:
        body = json.loads(read_bytes(path))
        body = body.get("profile", body)
        if (found := body.get("format")) != Profile.FORMAT:
            raise AcutanceError(f"{path} holds {found!r}: give a file of a profile or of a diagnosis")
        profile = Profile.from_dict(body)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AcutanceError(f"{path} is no file of a profile: {error}") from error
    return Profile(profile.readings, {"name": Path(path).stem, **profile.context})


def _profile(one: Any, batches: Iterable[Any] | None, options: dict[str, Any]) -> Profile:
    found = getattr(one, "profile", one)
    if isinstance(found, Profile):
        return found
    if isinstance(one, (str, os.PathLike)):
        if Path(one).suffix == ".json":
            return read_profile(one)
        loaded = load_model(str(one))
        own = next(iter(loaded.data.values()), None)
        profile = _profile(loaded.model, own() if batches is None and own is not None else batches, options)
        return Profile(profile.readings, {**profile.context, "name": loaded.name})
    if not isinstance(one, nn.Module):
        raise AcutanceError(f"compare takes profiles, diagnoses, models or names of them, not {type(one).__name__}")
    if batches is None:
        raise AcutanceError("to compare models say what they read: compare(model, other, batches=[…])")
    return measure(one, batches, **options)
