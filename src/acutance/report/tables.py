"""Tables of text for terminals of any width, for notebooks and for pages."""

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from acutance.errors import AcutanceError, import_extra
from acutance.files.atomic import atomic_write, read_json

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame  # other rooms take it from here: pandas may be missing
else:
    DataFrame = Any

WRAPPED = 40  # least width of a column of sentences, borders included
WIDTH = 80  # columns of text wherever there is no terminal

Rows = Sequence[Mapping[str, str]]  # column name to text; every row has the same columns


@dataclass(frozen=True)
class FittedTable:
    """One table if it fits the terminal, headings broken if need be; else several, each with the columns that fit."""

    title: str
    rows: Rows
    caption: str  # below, as wide as the terminal
    keys: Sequence[str] = ("layer",)  # columns that name a row, repeated in every table
    left: Sequence[str] = ()  # left-aligned columns
    sentences: str | None = None  # the column that may wrap
    headline: str = ""  # the answer in a sentence, above the table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = dict.fromkeys((*self.keys, *(self.rows[0] if self.rows else ())))
        cells = {name: max([0, *(cell_len(row[name]) for row in self.rows)]) for name in names}
        heads = {name: [name] for name in names}
        widths = self._widths(heads, cells)
        if sum(widths.values()) >= options.max_width:
            heads = {name: _broken(name, cells[name]) for name in names}
            widths = self._widths(heads, cells)
        groups: list[list[str]] = [[]]
        for column in [name for name in names if name not in self.keys]:
            if groups[-1] and 1 + sum(widths[name] for name in (*self.keys, *groups[-1], column)) > options.max_width:
                groups.append([])
            groups[-1].append(column)
        if self.headline:
            yield Text(self.headline, style="bold")
        for title, group in zip_longest([self.title], groups):
            table = Table(title=title, title_justify="left")
            for column in (*self.keys, *group):
                table.add_column("\n".join(heads[column]), justify="left" if column in self.left else "right")
            for row in [row for row in self.rows if any(row[column] for column in group)]:
                table.add_row(*(row[column] for column in (*self.keys, *group)))
            yield table
        yield Text(self.caption, style="table.caption")

    def _widths(self, heads: Mapping[str, Sequence[str]], cells: Mapping[str, int]) -> dict[str, int]:
        """The width of every column, borders included."""
        widths = {name: max(cells[name], *map(cell_len, lines)) + 3 for name, lines in heads.items()}
        return widths | ({} if self.sentences not in widths else {self.sentences: WRAPPED})

    def __str__(self) -> str:
        console = Console(width=WIDTH, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def _repr_html_(self) -> str:
        headline = f"<p><b>{escape(self.headline)}</b></p>" if self.headline else ""
        return f"{headline}<h4>{escape(self.title)}</h4>{html_table(self.rows)}<p>{escape(self.caption)}</p>"


class Result(ABC):
    """What results have in common: they print as a table, turn into a data frame, and are saved and loaded as JSON."""

    FORMAT: ClassVar[str]  # of the file
    INDENT: ClassVar[int | None] = 1
    context: Mapping[str, Any]

    @abstractmethod
    def table(self) -> FittedTable: ...
    @abstractmethod
    def rows(self) -> list[dict[str, Any]]: ...  # of the data frame
    @abstractmethod
    def content(self) -> dict[str, Any]: ...  # of the file, beside its format and the context
    @classmethod
    @abstractmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self: ...  # what `to_dict` took apart

    @property
    def title(self) -> str:
        """The model and its mitigation, in one line."""
        model, mitigation = self.context.get("model", "model"), self.context.get("mitigation")
        return f"{model} + {mitigation}" if mitigation else str(model)

    def __str__(self) -> str:
        return str(self.table())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_frame(self) -> DataFrame:
        """The rows as a pandas DataFrame."""
        return data_frame(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"format": self.FORMAT, "context": dict(self.context), **self.content()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=self.INDENT, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON, atomically."""
        return atomic_write(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        return read_json(path, cls.FORMAT, cls.from_dict)

    def resumed(self, path: str | os.PathLike[str] | None, otherwise: str) -> Self:
        """What an interrupted run has saved there, or this, its empty start. Another context is refused."""
        if path is None or not Path(path).exists():
            return self
        found, own = self.load(path), self.context
        if differing := [key for key in {**own, **found.context} if own.get(key) != found.context.get(key)]:
            shown = "; ".join(f"{key}: there {found.context.get(key)}, here {own.get(key)}" for key in differing)
            raise AcutanceError(f"{path} {otherwise} ({shown}): name another file with --json, or remove it")
        return found


def short(x: float, like: float | None = None) -> str:
    """Two or three significant digits; as many decimals as `like` has."""
    size = abs(x if like is None else like)
    if not math.isfinite(size) or (0 < size < 0.01 and like is None):
        return f"{x:.2g}"
    return f"{x:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def _broken(name: str, width: int) -> list[str]:
    """A heading in lines of this width if possible, broken after an underscore or at a space."""
    pieces = re.sub(r"_(?=\w)", "_ ", re.sub(" (?=[↑↓])", "\xa0", name))
    lines = wrap(pieces, max([width, *map(cell_len, pieces.split(" "))]), break_long_words=False)
    return [line.replace("_ ", "_").replace("\xa0", " ") for line in lines]


def data_frame(rows: list[dict[str, Any]]) -> DataFrame:
    """The rows as a pandas DataFrame."""
    needed = "to_frame needs pandas: pip install 'acutance[report]'"
    return import_extra("pandas", needed).DataFrame(rows)  # type: ignore[no-any-return]


def html_table(rows: Rows) -> str:
    """The rows as an HTML table, escaped; an empty string without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A Markdown table; `numbers` aligns all columns but the first to the right."""
    rule = ["---", *["---:" if numbers else "---"] * (len(columns) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, rule, *rows))


def to_plain(value: Any) -> Any:
    """What JSON can hold: infinity and NaN by name, complex arrays by their parts."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        is_complex = np.iscomplexobj(value)
        return {"real": value.real.tolist(), "imag": value.imag.tolist()} if is_complex else value.tolist()
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
