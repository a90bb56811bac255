"""Progress: what a command shows on a terminal while it works, and the question that it asks there.

Both go to standard error, so that standard output has the answer alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.status import Status

from pdstore.errors import ConfigError

_QUIET_S = 1.0
"""A scan that ends within this time shows no count."""
_STEP = 1000
"""Values between two looks at the clock."""
_T = TypeVar("_T")
_SHOWN: ContextVar[Status | None] = ContextVar("shown", default=None)


@contextmanager
def working(console: Console | None = None) -> Iterator[None]:
    """Shows a line while the code inside runs, if standard error is a terminal."""
    with (console or Console(stderr=True)).status("working …") as status:
        token = _SHOWN.set(status)
        try:
            yield
        finally:
            _SHOWN.reset(token)


def tell(text: str) -> None:
    """Replaces the line that `working` shows."""
    status = _SHOWN.get()
    if status is not None:
        status.update(text)


def scanned(
    items: Iterable[_T],
    what: str,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = tell,
) -> Iterator[_T]:
    """Yields items, and tells how many there were once that has taken more than a second.

    what: the things and their place, as `values of shm://pool`.
    """
    begin_s = clock()
    for number, item in enumerate(items, start=1):
        if number % _STEP == 0 and clock() - begin_s > _QUIET_S:
            tell(f"{number:,} {what} …")
        yield item


def confirm(question: str, option: str) -> bool:
    """Asks a question on the terminal; only `y` and `yes` agree.

    option: what to give in place of an answer. Raises ConfigError if nobody can be asked, because
      standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{question}: nobody can be asked, as standard input is no terminal; give {option}"
        )
    status = _SHOWN.get()
    if status is not None:
        status.stop()
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower()
    if status is not None:
        status.start()
    return answer in ("y", "yes")
