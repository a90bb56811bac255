"""The memory of one client: registered once, freed only when nobody knows it any more."""

from __future__ import annotations

import mmap

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.native.library import address_of
from pdstore.store.mooncake.memory import MOST_ABANDONED, Memory
from pdstore.testing import fresh_keys
from pdstore.testing.values import put
from tests.support.mooncake_double import RawDouble


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


def test_only_so_many_bounces_are_given_up_and_each_stays_where_it_is():
    memory, addresses = Memory(None), set()
    for _ in range(MOST_ABANDONED):
        addresses.add(address_of(memory.bounce(4096)))
        assert memory.abandon_bounce()
    assert address_of(memory.bounce(4096)) not in addresses
    assert len(addresses) == MOST_ABANDONED
    assert not memory.abandon_bounce()


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
