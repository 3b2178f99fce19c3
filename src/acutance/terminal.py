"""Tables for terminals of any width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WRAPPED = 40  # what a column of sentences is given at least, borders included


@dataclass(frozen=True)
class FittedTable:
    """One table where there is room for it, else several below one another, each with the columns that fit."""

    build: Callable[[Sequence[str]], Table]  # the table of some of the columns; what names its rows comes with them
    columns: Sequence[str]
    caption: str  # below, as wide as the terminal
    sentences: str | None = None  # the column that may be wrapped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups: list[list[str]] = [[]]
        for column in self.columns:
            if groups[-1] and self._width([*groups[-1], column], console, options) > options.max_width:
                groups.append([])
            groups[-1].append(column)
        for number, group in enumerate(groups):
            table = self.build(group)
            if number > 0:
                table.title = None
            yield table
        yield Text(self.caption, style="table.caption")

    def _width(self, columns: list[str], console: Console, options: ConsoleOptions) -> int:
        table = self.build([column for column in columns if column != self.sentences])
        unwrapped = Measurement.get(console, options.update(max_width=10_000), table).maximum
        return unwrapped + (WRAPPED if self.sentences in columns else 0)
