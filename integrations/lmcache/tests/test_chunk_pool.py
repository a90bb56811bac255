"""ChunkPool: each call ends once, in time, whatever the store does."""

from __future__ import annotations

import contextlib
import queue

import pytest

from pdstore.errors import Reason
from pdstore.metrics import Metrics
from pdstore.store.memory import MemoryStore
from pdstore.testing import Faulty
from pdstore_lmcache.chunk_names import ChunkNames
from pdstore_lmcache.chunk_pool import ChunkMemory, ChunkPool
from test_chunk_mover import SHAPE, chunk
from tests.support.kv import settings_of

CHUNKS = [chunk(chunk_hash=bytes([number]) * 32) for number in range(3)]
SIZE = 6144
LONG_S = 60.0


@pytest.fixture
def store():
    store = Faulty(MemoryStore())
    yield store
    store.release()


@pytest.fixture
def open_pool(store):
    with contextlib.ExitStack() as stack:

        def open_pool(bounds=None, **settings):
            usual = {"weights": "w", "workers": 2, "deadline_s": LONG_S}
            settings = settings_of(**(usual | settings))
            pool = ChunkPool(settings, ChunkNames(settings), Metrics(), store, **(bounds or {}))
            return stack.enter_context(contextlib.closing(pool))

        yield open_pool


def memories(fill=0):
    return [ChunkMemory(each, SHAPE, memoryview(bytearray([fill] * SIZE))) for each in CHUNKS]


def asked():
    return [(each, SHAPE) for each in CHUNKS]


def ended(call, *args):
    """Waits for the end of a call and returns it."""
    ends = queue.SimpleQueue()
    call(*args, ends.put)
    return ends.get(timeout=LONG_S)


def test_what_was_saved_is_found_and_loaded(open_pool):
    pool, loaded = open_pool(), memories()
    assert ended(pool.find, asked()).reason is Reason.ABSENT
    assert all(ended(pool.save, memories(7)).done)
    assert all(ended(pool.find, asked()).done)
    assert all(ended(pool.load, loaded).done)
    assert [each.memory for each in loaded] == [each.memory for each in memories(7)]
    assert ended(pool.find, [asked()[0], asked()[0]]).done == (True, True)
    pool.remove(asked()[:1])
    assert ended(pool.find, asked()).done == (False, True, True)
    for call in (pool.find, pool.load, pool.save):
        result = ended(call, [])
        assert (result.done, result.reason) == ((), None)


@pytest.mark.parametrize("call", ["find", "load", "save"])
def test_a_hung_store_costs_the_deadline_and_a_miss(open_pool, store, call):
    """Nothing that comes after the deadline is written."""
    pool, late = open_pool({"lookup_timeout_s": 0.2}, deadline_s=0.2), memories()
    if call == "load":
        ended(pool.save, memories(7))
    store.hold()
    result = ended(getattr(pool, call), asked() if call == "find" else late)
    assert (any(result.done), result.reason) == (False, Reason.DEADLINE)
    store.release()
    ended(pool.load, memories())  # the workers are back
    assert not any(any(each.memory) for each in late)


def test_more_calls_than_may_wait_are_dropped(open_pool, store):
    pool = open_pool({"max_calls": 1})
    store.hold()
    ends = queue.SimpleQueue()
    pool.load(memories(), ends.put)
    assert ended(pool.load, memories()).reason is Reason.QUEUE_FULL
    store.release()
    assert ends.get(timeout=LONG_S).reason is Reason.LOST


def test_the_end_ends_what_waits_and_refuses_what_comes(open_pool, store):
    pool, ends = open_pool(), queue.SimpleQueue()
    store.hold()
    pool.load(memories(), ends.put)
    pool.find(asked(), ends.put)
    store.release()
    pool.close()
    pool.close()
    assert len({id(ends.get(timeout=LONG_S)) for _ in range(2)}) == 2
    assert ended(pool.save, memories()).reason is Reason.CLOSED
