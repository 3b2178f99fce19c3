"""What a table or figure is made of, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# A published number; with its spread over seeds where the paper gives one.
Published = float | tuple[float, float]
State = Literal["trained", "initial"]


@dataclass(frozen=True)
class Training:
    """A run that targets need: a recipe, and how it differs from it. Named once, shared by all targets."""

    recipe: str
    changes: tuple[str, ...] = ()  # as --set takes them
    starts_from: tuple[str, str] | None = None  # a field of the task, and the name of the training it is filled from


@dataclass(frozen=True)
class Row:
    """One model of a table, or one curve of a figure, and what the paper says of it."""

    label: str
    training: str | None = None  # a name in `trainings.TRAININGS`
    state: State = "trained"  # initial: as drawn, before any step
    model: str | None = None  # instead of a training: a pretrained model, as `acutance measure` takes it
    published: Mapping[str, Published] = field(default_factory=dict)  # by column


@dataclass(frozen=True)
class Target:
    """A table or figure."""

    name: str
    title: str
    paper: str  # its arXiv number
    measure: str  # a name in `measures.MEASURES`; empty where there is nothing to run
    rows: tuple[Row, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)  # heading to what is read, in the measure's own words
    data: str = ""  # what it needs
    cost: str = ""
    notes: str = ""  # where the paper leaves a choice, and which was made
    seeds: int = 3

    @property
    def trainings(self) -> tuple[str, ...]:
        """The names of the trainings that must be finished, in the order of the rows, each once."""
        named = (row.training for row in self.rows if row.training is not None and row.state == "trained")
        return tuple(dict.fromkeys(named))
