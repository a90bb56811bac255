"""MappedMemory: a store's memory is registered once, in pieces that no value crosses."""

from __future__ import annotations

import pytest

from pdstore.errors import SwapError
from pdstore.native.library import address_of
from pdstore.worker.mapped_memory import MappedMemory


class Registrar:
    def __init__(self, fails_at=None):
        self.spans, self.num_populated, self._fails_at = {}, 0, fails_at

    def populate(self, address, num_bytes):
        self.num_populated += 1

    def register(self, address, num_bytes):
        if len(self.spans) == self._fails_at:
            raise SwapError("no more")
        self.spans[address] = num_bytes

    def unregister(self, address):
        del self.spans[address]


def test_all_of_the_memory_is_registered_and_later_not_any_more(arena):
    registrar = Registrar()
    memory = MappedMemory(arena, registrar)
    memory.ready(10)
    start, view = address_of(arena.memory()), arena.memory()
    assert sorted(registrar.spans) == list(range(start, start + len(view), arena.span_bytes))
    assert sum(registrar.spans.values()) == memory.num_bytes == len(view)
    memory.close()
    assert registrar.spans == {}


def test_without_a_registrar_nothing_is_registered(arena):
    memory = MappedMemory(arena, None)
    memory.ready(0)
    memory.close()


def test_a_piece_that_cannot_be_registered_undoes_the_others(arena):
    registrar = Registrar(fails_at=3)
    memory = MappedMemory(arena, registrar)
    with pytest.raises(SwapError):
        memory.ready(10)
    memory.close()
    assert registrar.spans == {}
