"""printable: text that others have chosen, fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns text with a `?` for each control character but line ends.

    Whoever may write to a pool chooses keys, and a key may be an instruction to a terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
