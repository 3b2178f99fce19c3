"""What `measure` can read: each metric says beside its formula which way it goes, its range and what it means."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from acutance.attention import AttentionCall


class Meaning(NamedTuple):
    """What a metric tells: where tokens go as it grows, the range of its values, and one sentence."""

    higher: Literal["smoother", "sharper", "neither"]
    range: tuple[float, float]
    sentence: str


TOKEN_METRICS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {}
ATTENTION_METRICS: dict[str, Callable[[AttentionCall, Tensor | None], Tensor]] = {}
MEANINGS: dict[str, Meaning] = {}
Metric = TypeVar("Metric", bound=Callable[..., Tensor])


def metric(
    of: str, higher: Literal["smoother", "sharper", "neither"], range: tuple[float, float], sentence: str
) -> Callable[[Metric], Metric]:
    """Register a function of "tokens", or of parts of an `AttentionCall` such as "A output", and of a mask.

    An empty `of` registers the meaning alone.
    """

    def register(function: Metric) -> Metric:
        MEANINGS[function.__name__] = Meaning(higher, range, sentence)
        if of == "tokens":
            TOKEN_METRICS[function.__name__] = function
        elif of:
            parts = of.split()
            ATTENTION_METRICS[function.__name__] = lambda call, mask: function(*(getattr(call, p) for p in parts), mask)
        return function

    return register
