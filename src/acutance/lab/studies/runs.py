"""Several runs of one measurement, such as those of several seeds."""

from collections.abc import Iterable

from acutance.errors import AcutanceError
from acutance.measure.profile import MetricValue, Profile
from acutance.measure.reader import pooled


def merge(profiles: Iterable[Profile]) -> Profile:
    """The mean of the same measurement over several runs (seeds). `std` is then the spread over runs."""
    runs = list(profiles)
    keys = [[(r.tap, r.layer, r.metric) for r in p.readings] for p in runs]
    if not runs or any(k != keys[0] for k in keys):
        raise AcutanceError("only profiles of the same taps, layers and metrics can be merged")
    means = zip(*([(1, r.mean, 0.0) for r in p.readings] for p in runs), strict=True)
    values = tuple(MetricValue(*key, *pooled(parts)) for key, parts in zip(keys[0], means, strict=True))
    return Profile(values, {**runs[0].context, "runs": len(runs)})
