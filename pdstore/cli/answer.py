"""Answer: the result of a command, as tables for people and as one JSON document for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pdstore.cli.main import drop_output
from pdstore.cli.printable import printable
from pdstore.errors import ConfigError
from pdstore.format.namespace import Json

_WIDE = 200


@dataclass
class Answer:
    """The result of a command.

    document: for `--json`; keys and values, never a sentence that is nowhere else.
    shown: for people, in order.
    status: exit status: 0, or 1 where something is wrong that the command was asked about.
    """

    document: Json
    shown: list[RenderableType] = field(default_factory=list)
    status: int = 0


class Output:
    """The place for an answer: the terminal, or a JSON file. `-` is standard output.

    Opened before the work begins, so that a path that cannot be written costs nothing. Raises
    ConfigError.
    """

    def __init__(self, target: str | None) -> None:
        self._target = target
        if target not in (None, "-"):
            self._write("")

    def emit(self, answer: Answer) -> None:
        """Writes an answer. Raises ConfigError."""
        text = json.dumps(answer.document, indent=1) + "\n"
        if self._target not in (None, "-"):
            self._write(text)
            return
        try:
            if self._target == "-":
                sys.stdout.write(text)
            else:
                _show(answer.shown)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            drop_output()
            raise ConfigError(f"cannot write standard output: {error.strerror}") from error

    def _write(self, text: str) -> None:
        try:
            Path(str(self._target)).write_text(text)
        except OSError as error:
            raise ConfigError(f"--json: cannot write {self._target}: {error.strerror}") from error


def _show(parts: Sequence[RenderableType]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no edge to fold at
        console.width = _WIDE
    for part in parts:
        console.print(_as_it_is(part))


def table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]]) -> Table:
    """Returns a table without a frame; columns whose name begins with `>` are numbers.

    A cell that is a str shows as it is; a `Text` may have a style.
    """
    has_names = any(columns)
    made = Table(
        box=box.SIMPLE_HEAD if has_names else None,
        show_header=has_names,
        pad_edge=False,
        show_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for name in columns:
        is_number = name.startswith(">")
        made.add_column(
            name.lstrip(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*map(_as_it_is, row))
    return made


def _as_it_is(part: RenderableType) -> RenderableType:
    """Keeps rich from taking text for its markup, and a terminal from obeying it."""
    return Text(printable(part)) if isinstance(part, str) else part


def heading(text: str) -> Text:
    """Returns a line in bold."""
    return Text(text, style="bold")


def muted(text: str) -> Text:
    """Returns a line in a dim colour."""
    return Text(text, style="dim")


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Shows on a terminal's stderr that work goes on, until it has ended."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield
