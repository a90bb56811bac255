"""What the user sees while the demo runs: lines that stay, and one that does not."""

from __future__ import annotations

import sys

_WIDTH = 99
_CLEAR = "\r\x1b[K"


def show(text: str) -> None:
    """What is being done now; the next call overwrites it. Nothing where there is no terminal."""
    if sys.stdout.isatty():
        print(_CLEAR + text[:_WIDTH], end="", flush=True)


def say(*lines: str) -> None:
    """Lines that stay."""
    show("")
    print(*lines, sep="\n", flush=True)
