"""Memory is kept until nobody can write to it, and registered once."""

from __future__ import annotations

import mmap
import threading
from types import SimpleNamespace

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.native.library import address_of
from pdstore.store.mooncake.barrier import KEPT, Lane, Memory
from pdstore.store.mooncake.client import Client, State
from pdstore.testing import fresh_keys
from pdstore.testing.values import put, start_background
from tests.support.kv import eventually
from tests.support.mooncake_double import RawDouble


class Case:
    """A lane, what it stands between, and the objects that its client makes in turn."""

    def __init__(self, server, *, shares: bool) -> None:
        self.raw, self.other, self.server = RawDouble(), RawDouble(), server
        left = [self.raw, self.other]
        self.memory = Memory(None)
        self.client = Client("x", server, lambda: left.pop(0))
        sharer = server if shares else None
        self.lane = Lane("x", self.client, self.memory, sharer, pause_s=0.001)
        with self.client.call():
            self.memory.connect(self.raw)
        self.view = self.memory.allocate(1 << 20)

    def wait_after(self, code=-900, seconds=1.0) -> None:
        self.lane.wait_after(self.raw, [code], seconds, lambda: False)

    def start_waiting(self, code=-900, seconds=1.0) -> SimpleNamespace:
        """Waits after such an answer, on a thread; `has_ended` says whether that is over."""
        over = threading.Event()

        def wait():
            self.wait_after(code, seconds)
            over.set()

        join = start_background(wait)
        eventually(lambda: self.client.codes[KEPT])
        return SimpleNamespace(join=join, has_ended=over.is_set)

    def attempts(self) -> None:
        """Returns when the lane has tried twice more."""
        asked = self.server.num_asked
        eventually(lambda: self.server.num_asked > asked + 1)


@pytest.fixture
def shared(server):
    return Case(server, shares=True)


@pytest.mark.parametrize(
    ("code", "state"),
    [(-1, State.HANGS), (-900, State.HANGS), (-901, State.HANGS), (-900, State.UNREACHABLE)],
)
def test_shared_memory_is_kept_while_the_other_process_may_live_and_others_are_refused(
    shared, code, state
):
    shared.server.state = state
    waiting = shared.start_waiting(code)
    shared.attempts()
    assert not waiting.has_ended()
    with pytest.raises(StoreUnavailable, match="under way"), shared.client.call():
        pass
    shared.server.state = State.ANSWERS
    waiting.join(5)
    assert shared.raw.buffers == []
    assert shared.raw.is_closed
    with shared.client.call() as raw:
        assert raw is shared.other, "requests of the old connection mean nothing to the new one"


@pytest.mark.parametrize("fault", ["ping", "unregister"])
def test_an_answer_is_no_proof_before_the_memory_is_forgotten(shared, fault):
    if fault == "ping":
        shared.raw.health = 2
    else:
        shared.raw.unregister_codes = [-900] * 1000
    waiting = shared.start_waiting()
    shared.attempts()
    assert not waiting.has_ended()
    assert not shared.raw.is_closed
    shared.raw.health = 0
    shared.raw.unregister_codes = []
    waiting.join(5)


def test_a_process_that_ended_writes_no_more_and_the_connection_stays(shared):
    shared.server.state = State.GONE
    shared.wait_after()
    shared.server.state = State.ANSWERS
    with shared.client.call() as raw:
        assert raw is shared.raw, "it finds the successor by itself"


def test_the_connection_is_not_replaced_while_another_call_runs_on_it(shared):
    with shared.client.call():
        waiting = shared.start_waiting()
        shared.attempts()
        assert not waiting.has_ended()
        assert not shared.raw.is_closed
    waiting.join(5)
    assert shared.raw.is_closed


def test_a_call_waits_on_when_the_store_is_closed_meanwhile(shared):
    shared.server.state = State.HANGS
    waiting = shared.start_waiting()
    shared.memory.disconnect()
    shared.client.close()
    shared.attempts()
    assert not waiting.has_ended()
    assert not shared.raw.is_closed
    shared.server.state = State.ANSWERS
    waiting.join(5)
    assert shared.raw.is_closed


def test_a_direct_transfer_that_the_library_gave_up_ends_with_its_connection(server):
    direct = Case(server, shares=False)
    direct.wait_after(-800, 61.0)
    assert direct.raw.is_closed
    assert direct.client.codes[KEPT] == 1
    with direct.client.call() as raw:
        assert raw is direct.other


def test_staging_is_registered_once_whenever_it_was_allocated(store, raw):
    """Rule 2."""
    views = [store.allocate(1 << 20)]
    assert raw.buffers == []
    for _ in range(2):
        put(store, fresh_keys(1), [b"x"])
        assert [size for _, size in raw.buffers] == [1 << 20]
    views.append(store.allocate(2 << 20))
    assert [size for _, size in raw.buffers] == [1 << 20, 2 << 20]
    del views[0]
    store.allocate(4096)
    assert [size for _, size in raw.buffers] == [2 << 20]


def test_memory_is_neither_taken_nor_freed_while_any_connection_is_made_again(raw):
    """The library walks its list of memory meanwhile, without a lock: the process would crash."""
    allocator, reconnecting = CountingAllocator(), RawDouble()
    memory, other = Memory(allocator, wait_s=0.0), Memory(allocator)
    memory.connect(raw)
    other.connect(reconnecting)
    view = memory.allocate(1 << 20)
    del view
    reconnecting.health = 2
    with pytest.raises(StoreUnavailable):
        memory.allocate(1 << 20)
    assert allocator.freed == []
    reconnecting.health = 0
    memory.allocate(4096)
    assert len(allocator.freed) == 1


def test_a_slab_is_not_freed_before_the_other_side_forgets_it(raw):
    """Another slab at its address would be taken for it."""
    allocator = CountingAllocator()
    memory = Memory(allocator)
    memory.connect(raw)
    view = memory.allocate(1 << 20)
    del view
    raw.unregister_codes = [-900]
    memory.allocate(4096)
    assert allocator.freed == []
    memory.allocate(4096)
    assert len(allocator.freed) == 1


class CountingAllocator:
    """Memory of this process, in the place of the library's."""

    def __init__(self):
        self._held, self.freed = {}, []

    def alloc(self, size):
        mapping = mmap.mmap(-1, size)
        address = address_of(memoryview(mapping))
        self._held[address] = mapping
        return address

    def free(self, address):
        self.freed.append(address)
        return 0
