"""Printing for people. Text of models, tools and customers is shown, and never obeyed.

A terminal takes control characters for orders, and Rich takes brackets for markup; neither may come
from outside.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, Final

from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from handrail.legible import visible

LEAST_WIDTH: Final = 120  # columns of a table
PIPE_WIDTH: Final = 200  # columns where nobody looks: what `grep` reads must not be folded


def console() -> Console:
    """A console on the standard output that interprets nothing in what it prints."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def show(made: Table) -> None:
    """Print a table; on a narrow terminal its lines are broken, rather than each of its cells."""
    out = console()
    if sys.stdout.isatty():
        size = get_terminal_size()
        out.size = ConsoleDimensions(max(LEAST_WIDTH, size.columns), size.lines)
    out.print(made)


def say(text: object = "", *, style: str = "") -> None:
    """Print one line; text from outside in it is made visible."""
    console().print(Text(visible(text), style=style), soft_wrap=True)


def heading(title: str) -> None:
    """Print a title, with a line free before it."""
    say()
    say(title, style="bold")


def note(text: object) -> None:
    """Print one line for people, beside what the command was asked for."""
    print(visible(text), file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """Print one JSON value, in ASCII."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Make a table; a cell that is a `Text` keeps its style, everything else is made visible."""
    made = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):  # the first names the row: it can be copied whole
        made.add_column(column, overflow="fold", header_style="bold", no_wrap=number == 0)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row))
    return made


def details(pairs: Mapping[str, object]) -> Table:
    """Make a list of names and values."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in pairs.items():
        made.add_row(name, Text(visible(value)))
    return made


def compact(value: Any) -> str:
    """Write a JSON value on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


__all__ = [
    "compact",
    "console",
    "details",
    "heading",
    "note",
    "say",
    "say_json",
    "show",
    "table",
    "visible",
]
