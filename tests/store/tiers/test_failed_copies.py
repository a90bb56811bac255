"""What becomes of copies while a tier fails: they wait, in their order, and hold nobody up."""

from __future__ import annotations

import time

import pytest

from pdstore.errors import StoreTimeout, StoreUnavailable
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys
from pdstore.store.tiers import copies
from pdstore.store.tiers.copy_queue import CopyQueue
from pdstore.store.wrappers import WrapperStore
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import put
from tests.store.tiers.conftest import copies_of
from tests.support.kv import eventually

SIZE = 4096


def put_all(store, keys):
    assert put(store, keys, [content(key, SIZE) for key in keys]) == len(keys)


class Down(WrapperStore):
    """A server whose puts or gets fail while `error` is set, after `num_served` keys of a call."""

    def __init__(self, store, error=None, num_served=0):
        super().__init__(store)
        self.error = error
        self.num_served = num_served
        self.num_failed = 0

    def get(self, keys, slots):
        return self._serve(super().get, keys, slots)

    def put(self, keys, slots):
        return self._serve(super().put, keys, slots)

    def _serve(self, call, keys, slots):
        if self.error is None:
            return call(keys, slots)
        self.num_failed += 1
        num_done = call(keys[: self.num_served], slots.part(0, self.num_served))
        raise type(self.error)(str(self.error), num_done=num_done)


@pytest.mark.parametrize("num_served", [0, 2])
@pytest.mark.parametrize("error", [StoreUnavailable("down"), StoreTimeout("too late")])
def test_an_outage_loses_no_copies_and_keeps_their_order(open_tiers, error, num_served):
    first, inner = MemoryStore(), MemoryStore()
    below = Down(inner, error, num_served)
    store, one, other = open_tiers(first, below), fresh_keys(5), fresh_keys(3)
    put_all(store, one)
    eventually(lambda: below.num_failed, 10)
    put_all(store, other)
    assert not store.flush(0.1)
    below.error = None
    assert store.flush(20)
    assert inner.which_stored([*one, *other]) == [True] * 8
    assert copies_of(store) == {"copied": 8}


def test_a_first_tier_that_fails_loses_no_copies(open_tiers):
    inner, below = MemoryStore(), MemoryStore()
    first = Down(inner)
    store, keys = open_tiers(first, below), fresh_keys(5)
    put_all(inner, keys)
    first.error = StoreUnavailable("down")
    store.copy_down(keys, [SIZE] * 5)
    eventually(lambda: first.num_failed, 10)
    first.error = None
    assert store.flush(20)
    assert below.match(keys) == 5


@pytest.mark.parametrize("finds", [True, False])
def test_a_first_tier_that_fails_at_the_second_look_loses_no_copies(open_tiers, finds):
    class Failing(WrapperStore):
        """Fails in a search for blocks, once."""

        has_failed = False

        def match(self, keys):
            self.fail(keys)
            return super().match(keys)

        def which_stored(self, keys):
            self.fail(keys)
            return self.wrapped.which_stored(keys)

        def fail(self, keys):
            if ":purge:" not in keys[0] and not self.has_failed:
                self.has_failed = True
                raise StoreUnavailable("down")

        def optional(self, protocol):
            return None if protocol is FindsKeys and not finds else super().optional(protocol)

    first, below = Failing(MemoryStore()), MemoryStore()
    store, keys = open_tiers(first, below), fresh_keys(5)
    put_all(store, keys)
    assert store.flush(20)
    assert first.has_failed
    assert below.match(keys) == 5
    assert copies_of(store) == {"copied": 5}


def test_values_at_which_a_tier_always_fails_do_not_hold_the_others_up(open_tiers, monkeypatch):
    monkeypatch.setattr(copies, "PAUSE_S", 0.01)
    monkeypatch.setattr(copies, "LONGEST_PAUSE_S", 0.05)
    first, inner = MemoryStore(), MemoryStore()
    below = FailsAt(inner)
    store, keys, others = open_tiers(first, below), fresh_keys(3), fresh_keys(3)
    below.key = keys[1]
    put_all(store, keys)
    put_all(store, others)
    assert store.flush(30)
    assert inner.which_stored([*keys, *others]) == [True, False, False, True, True, True]
    assert copies_of(store) == {"copied": 4, "given_up": 2}


class FailsAt(WrapperStore):
    """Takes all values but that of one key, and answers searches."""

    key = ""

    def put(self, keys, slots):
        if self.key not in keys:
            return super().put(keys, slots)
        at = keys.index(self.key)
        super().put(keys[:at], slots.part(0, at))
        raise StoreUnavailable("not this one", num_done=at)


def test_what_is_put_back_waits_in_front_in_its_order_unless_it_was_dropped():
    queue = CopyQueue(most_bytes=100 * SIZE)
    one, other = fresh_keys(5), fresh_keys(2)
    queue.add(one, [SIZE] * 5)
    queue.add(other, [SIZE] * 2)
    assert [key for key, _ in queue.take(4 * SIZE)] == one[:4]
    queue.drop(one[2:3].__contains__)
    queue.put_back(one[1:4])
    queue.end(0)
    assert queue.num_bytes == 5 * SIZE
    assert [key for key, _ in queue.take(100 * SIZE)] == [one[1], one[3], one[4]]
    queue.end(0)
    assert [key for key, _ in queue.take(100 * SIZE)] == other
    assert queue.num_given_up == 0


def test_what_is_put_back_keeps_the_bound_and_is_in_the_queue_once():
    queue = CopyQueue(most_bytes=4 * SIZE)
    one, other = fresh_keys(3), fresh_keys(3)
    queue.add(one, [SIZE] * 3)
    assert [key for key, _ in queue.take(100 * SIZE)] == one
    queue.add([one[0], *other], [SIZE] * 4)
    queue.put_back(one)
    queue.end(0)
    assert queue.num_bytes == 4 * SIZE
    assert queue.num_given_up == 2
    assert [key for key, _ in queue.take(100 * SIZE)] == [one[0], *other]


def test_a_removal_waits_for_one_batch_however_many_wait(open_tiers, monkeypatch):
    monkeypatch.setattr(copies, "BATCH_BYTES", SIZE)
    first, inner = MemoryStore(), MemoryStore()
    below = SlowPuts(inner)
    store, keys = open_tiers(first, below), fresh_keys(400)
    put_all(store, keys)
    eventually(lambda: below.num_puts > 1, 10)
    num_puts = below.num_puts
    for key in keys[-20:]:
        store.remove([key])
    assert below.num_puts <= num_puts + 22, "one for each removal"


class SlowPuts(WrapperStore):
    """A disk that takes a while for each put, with the interpreter's lock free."""

    num_puts = 0

    def put(self, keys, slots):
        self.num_puts += 1
        time.sleep(0.02)
        return super().put(keys, slots)
