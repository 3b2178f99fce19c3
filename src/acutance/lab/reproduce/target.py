"""What a table or figure is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from acutance.lab.reproduce.page import Sheet
    from acutance.lab.reproduce.run import Session

# A published number; with its spread over seeds where the paper gives one.
Published = float | tuple[float, float]
PAPERS = {"neutreno": "2312.00751", "oversmoothing": "2401.04301"}


@dataclass(frozen=True)
class Training:
    """A run that targets need, as a recipe and the fields that differ from it. Targets share runs by name."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()  # as --set takes them
    base: Training | None = None  # the training it starts from
    start: str = "weights"  # the task's field that takes the base's weights

    def vary(self, suffix: str, *changes: str) -> Training:
        """The same recipe with further changes."""
        return Training(f"{self.name}-{suffix}", self.recipe, (*self.changes, *changes))


@dataclass(frozen=True)
class Row:
    """One model of a table, or one curve of a figure, and its published numbers."""

    label: str
    training: Training | None = None
    published: Mapping[str, Published] = field(default_factory=dict)  # by column
    state: Literal["trained", "initial"] = "trained"  # initial: before any step
    model: str | None = None  # a pretrained model instead of a training, as `acutance measure` takes it


@dataclass(frozen=True)
class Target:
    """A table or figure."""

    name: str
    title: str
    measure: Callable[[Session], list[Sheet]] | None  # None: there is nothing to run
    rows: tuple[Row, ...] = ()
    needs: str = ""  # data and compute
    notes: str = ""  # what the paper leaves open, and what was chosen
    seeds: int = 3

    @property
    def paper(self) -> str:
        """Its arXiv number."""
        return PAPERS[self.name.partition("-")[0]]
