"""Beats: each one changes the ring, whatever the store did with the one before."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.format.handoff import RING, beat_key
from pdstore.format.namespace import Namespace, Part
from pdstore.store.memory import MemoryStore
from pdstore.worker.beats import Beats

NAMESPACE = Namespace({"n": 1}, (Part(0, 0),), block_tokens=4)
INSTANCE = "ab" * 16
KEYS = [beat_key(NAMESPACE, INSTANCE, n) for n in range(RING)]


class Unsteady(MemoryStore):
    """Raises in the calls that it is told to, before or after it has done them."""

    def __init__(self):
        super().__init__()
        self.fails = ""

    def put(self, keys, slots):
        if self.fails == "put":
            raise StoreUnavailable("on purpose")
        done = super().put(keys, slots)
        if self.fails == "answer":
            raise StoreUnavailable("on purpose")
        return done

    def remove(self, keys):
        if self.fails == "remove":
            raise StoreUnavailable("on purpose")
        super().remove(keys)


@pytest.fixture
def store():
    return Unsteady()


@pytest.fixture
def beats(store):
    return Beats(store, NAMESPACE, INSTANCE)


def ring(store) -> list[bool]:
    return store.which_stored(KEYS)


def test_the_last_two_beats_are_stored(store, beats):
    for number in range(3 * RING):
        beats.put_next()
        last = {number % RING, max(0, number - 1) % RING}
        assert {n for n, is_stored in enumerate(ring(store)) if is_stored} == last


@pytest.mark.parametrize("fails", ["put", "answer", "remove"])
def test_every_beat_after_an_error_changes_the_ring(store, beats, fails):
    for _ in range(5):
        beats.put_next()
    store.fails = fails
    beats.put_next()
    store.fails = ""
    for _ in range(3 * RING):
        before = ring(store)
        beats.put_next()
        assert ring(store) != before
