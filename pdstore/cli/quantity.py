"""Quantities as people read them: sizes, ages, shares."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float | None) -> str:
    """Returns bytes with a unit: `1.5 GiB`; a dash for None."""
    if num_bytes is None:
        return "-"
    step = 0
    while abs(num_bytes) >= 1000 and step < len(_UNITS) - 1:
        num_bytes, step = num_bytes / 1024, step + 1
    return f"{num_bytes:.3g} {_UNITS[step]}"


def age(seconds: float | None) -> str:
    """Returns a time as `8 s`, `12 min`, `3 h` or `5 d`; a dash for None."""
    if seconds is None:
        return "-"
    for limit, step, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / step:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def count(number: float) -> str:
    """Returns a number with thousands apart."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 value`, `1,200 values`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Returns a short time as `0.31 ms` or `1.2 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
