"""Finding: the result of one check, and its remedy."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.Enum):
    """The weight of a finding: BAD does not work, WARN works worse than it could."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    BAD = "bad"


class Finding(NamedTuple):
    """A finding. remedy: what to do, in the imperative; empty where nothing is to be done."""

    level: Level
    subject: str
    said: str
    remedy: str = ""


def ok(subject: str, said: str) -> Finding:
    return Finding(Level.OK, subject, said)


def info(subject: str, said: str) -> Finding:
    return Finding(Level.INFO, subject, said)


def warn(subject: str, said: str, remedy: str) -> Finding:
    return Finding(Level.WARN, subject, said, remedy)


def bad(subject: str, said: str, remedy: str) -> Finding:
    return Finding(Level.BAD, subject, said, remedy)
