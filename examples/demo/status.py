"""Prints the demo's progress: lines that stay, and one that the next replaces."""

from __future__ import annotations

import sys

_WIDTH = 99
_CLEAR = "\r\x1b[K"


def show(text: str) -> None:
    """Shows the current step until the next call; prints nothing without a terminal."""
    if sys.stdout.isatty():
        print(_CLEAR + text[:_WIDTH], end="", flush=True)


def say(*lines: str) -> None:
    """Prints lines that stay."""
    show("")
    print(*lines, sep="\n", flush=True)
