"""Output: what every command prints through, without a library that takes long to import."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pdstore.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(f"([0-9]+(?:[.][0-9]+)?) *({'|'.join(_SECONDS)})")


def printable(text: str) -> str:
    """Returns text with `?` in place of control characters, except line ends.

    Anyone who can write to a pool can choose a key that contains instructions to a terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def drop_output() -> None:
    """Sends standard output to /dev/null, so that flushing it at the exit raises no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flushes standard output after what is printed inside.

    Raises ConfigError if it cannot be written; BrokenPipeError if its reader has ended.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise ConfigError(f"cannot write standard output: {error.strerror}") from error


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 value`, `1,200 values`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds_of(text: str, option: str) -> float:
    """Returns a duration such as `90s`, `30min`, `12h` or `7d` in seconds.

    option: what the user gave it to. Raises ConfigError if it is none.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} {text!r} is no duration: write one like 90s, 30min, 12h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


def age(seconds: float | None) -> str:
    """Returns a duration as `8 s`, `12 min`, `3 h` or `5 d`; a dash for None."""
    if seconds is None:
        return "-"
    for limit, step, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / step:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def duration(seconds: float) -> str:
    """Returns a short time as `0.31 ms` or `1.2 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
