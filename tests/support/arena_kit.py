"""Arenas for tests: one whose calls can be watched, and the bytes of a value where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdstore.format.keys import Kind, kind_of
from pdstore.native.library import Library
from pdstore.store.arena.store import ArenaStore
from pdstore.testing.values import get


class SpiedArena(ArenaStore):
    """Notes the calls that move values; does something before or after one, if told to."""

    def __init__(self, library: Library, directory: Path, **options: object) -> None:
        super().__init__(library, "test", directory=directory, **{"size": 8 << 20, **options})
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}

    def _call(self, name, *args):
        self.calls.append(name)
        self.before.get(name, int)()
        answer = getattr(super(), name)(*args)
        self.after.get(name, int)()
        return answer

    def fill(self, batches):
        return self._call("fill", batches)

    def start_scatter(self, batch):
        return self._call("start_scatter", batch)

    def confirm(self, taken):
        return self._call("confirm", taken)

    def get(self, keys, slots):
        self.calls += ["get"] * any(kind_of(key) is Kind.BLOCK for key in keys)
        return super().get(keys, slots)

    def put(self, keys, slots):
        self.calls += ["put"] * any(kind_of(key) is Kind.BLOCK for key in keys)
        return super().put(keys, slots)


def place_of(arena: ArenaStore, key: str, size: int) -> memoryview:
    """Returns the bytes of a value in the arena's own memory."""
    (value,) = get(arena, [key], [size])
    memory = arena.memory()
    at = memory.obj.find(value)
    assert at >= 0
    return memory[at : at + size]
