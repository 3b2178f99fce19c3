"""compare: how models, runs and what was measured of them differ."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from acutance.diagnose.quality import NOT_MEASURED, Quality, measure_quality
from acutance.errors import AcutanceError
from acutance.files.atomic import read_bytes
from acutance.io.loading import load_model
from acutance.measure import measure
from acutance.measure.comparison import Comparison, compared
from acutance.measure.profile import Profile


def compare(*what: Any, batches: Iterable[Any] | None = None, **options: Any) -> Comparison:
    """How each differs from the first, layer by layer: a table of differences with intervals, and a sentence.

    Differences are paired over samples where both have read the same ones. Of models the quality is compared too.

    Args:
        what: two or more profiles, diagnoses or other results with a `profile`, files of these, models, or names of
            models and runs as the command line takes them.
        batches: what models read; those with a name may have data of their own. A list or a DataLoader without
            shuffling: every model reads them.
        options: for `measure`, for example metrics and tap.
    """
    if len(what) < 2:
        raise AcutanceError(f"compare takes two or more profiles, diagnoses, runs or models, got {len(what)}")
    profiles, qualities = zip(*(_measured(one, batches, options) for one in what), strict=True)
    return with_quality(compared(*profiles), qualities)


def with_quality(comparison: Comparison, qualities: Sequence[list[Quality] | None]) -> Comparison:
    """A comparison that says how the quality of models differs from the first's; None stands for what is no model."""
    first, *others = qualities
    lines = []
    for name, found in zip([*comparison.profiles][1:], others, strict=True):
        pairs = [(a, b) for a in first or () for b in found or () if (a.name, a.weights) == (b.name, b.weights)]
        lines += [f"{name}: {a.to(b)}: {a.change(b).verdict}" for a, b in pairs]
        lines += [f"{name}: {NOT_MEASURED}"] if not pairs and None not in (first, found) else []
    return replace(comparison, context={**comparison.context, **({"quality": lines} if lines else {})})


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


def _measured(one: Any, batches: Any, options: dict[str, Any]) -> tuple[Profile, list[Quality] | None]:
    found = getattr(one, "profile", one)
    if isinstance(found, Profile):
        return found, None
    if isinstance(one, (str, os.PathLike)):
        if Path(one).suffix == ".json":
            return read_profile(one), None
        loaded = load_model(str(one), head=True)
        own = next(iter(loaded.data.values()), None)
        given = own() if batches is None and own is not None else batches
        profile, qualities = _measured(loaded.model, given, options)
        return Profile(profile.readings, {**profile.context, "name": loaded.name}), qualities
    if not isinstance(one, nn.Module):
        raise AcutanceError(f"compare takes profiles, diagnoses, models or names of them, not {type(one).__name__}")
    if batches is None:
        raise AcutanceError("to compare models say what they read: compare(model, other, batches=[…])")
    read = batches if hasattr(batches, "__getitem__") else [*batches]
    return measure(one, read, **options), measure_quality(one, read)
