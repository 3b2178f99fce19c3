"""Laws: each must hold for every case that a strategy draws. A result is right, or refused with an AcutanceError.

A case is made of plain values, so that a failure prints how to make it again. Its check returns whether it was refused.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

STABLE: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
STABLE |= {"phases": (Phase.generate, Phase.shrink), "report_multiple_bugs": False}


@dataclass
class Law:
    cases: SearchStrategy
    check: Callable[[Any], bool | None]

    def __post_init__(self) -> None:
        self.tried: Counter[str] = Counter()

    def test(self, **options: Any) -> Callable[[], None]:
        """A test that tries the law on cases, as the settings say."""

        def counted(case):
            self.tried["examples"] += 1
            self.tried["refused"] += bool(self.check(case))

        return settings(**STABLE, **options)(given(case=self.cases)(wraps(self.check)(counted)))


LAWS: dict[str, Law] = {}


def law(cases: SearchStrategy, examples: int) -> Callable[[Callable[[Any], bool | None]], Callable[[], None]]:
    """A test of this many cases, always the same; run.py tries others."""

    def register(check):
        known = LAWS[check.__name__.removeprefix("test_")] = Law(cases, check)
        return known.test(max_examples=examples, derandomize=True)

    return register
