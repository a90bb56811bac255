"""Recorder: when an instance calls some functions in a hand-off, by one clock for all of them."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

now = time.perf_counter  # CLOCK_MONOTONIC: one clock for all processes of a machine

WATCHED = {
    "pdstore.worker.pool:KVPool.begin_load": "begin load",
    "pdstore.worker.mover:Mover.mark": "marker",
}
"""Functions by module, with what their calls are called."""


class Span(NamedTuple):
    """One call: seconds of `now()`."""

    name: str
    began: float
    ended: float


class Recorder:
    """Records the calls of the watched functions in this process, from `begin` on.

    Before the first `begin` nothing is wrapped, so that nothing is slowed down.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._is_installed = self._is_on = False

    def begin(self) -> None:
        if not self._is_installed:
            self._install()
        self._spans = []
        self._is_on = True

    def _install(self) -> None:
        self._is_installed = True
        for place, label in WATCHED.items():
            module_name, _, path = place.partition(":")
            owner_name, _, function_name = path.partition(".")
            owner = getattr(importlib.import_module(module_name), owner_name)
            setattr(owner, function_name, self._watched(getattr(owner, function_name), label))

    def take(self) -> list[Span]:
        """Stops, and returns what was recorded."""
        self._is_on = False
        return self._spans

    def _watched(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return function(*args, **kwargs)
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append(Span(label, began, now()))

        return call
