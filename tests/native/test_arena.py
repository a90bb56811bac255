"""The library's arenas: forks, and arguments that the library itself refuses."""

from __future__ import annotations

import os

import pytest

from pdstore.errors import StoreClosed, StoreUnavailable
from pdstore.native.arena import ArenaTimes, NativeArena, format_arena

MIB = 1 << 20
TIMES = ArenaTimes(1.0, 1.0, 1.0, 1.0, lock_timeout_s=0.5)


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "arena", os.O_CREAT | os.O_RDWR, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def open_arena(library, fd):
    format_arena(library, fd, 4 * MIB, MIB, seed=1)
    return lambda: NativeArena(library, fd, TIMES, "the arena")


def test_a_file_that_is_no_arena_is_refused(library, fd):
    with pytest.raises(StoreUnavailable):
        NativeArena(library, fd, TIMES, "the arena")


@pytest.mark.parametrize("key", ["", "k" * 201])
def test_a_key_of_no_length_or_too_long_is_refused(open_arena, key):
    with pytest.raises(ValueError, match="argument"):
        open_arena().match(["a", key])


def test_an_unknown_kind_is_refused(open_arena):
    with pytest.raises(ValueError, match="argument"):
        open_arena().reserve(["a"], b"\3", [100])


def test_a_slot_is_published_once_and_only_by_its_owner(open_arena):
    first, second = open_arena(), open_arena()
    slots, covered = first.reserve(["a", "b"], b"\0\0", [100, 100])
    stolen = slots.of([0, 1])
    assert (covered, second.publish(stolen, 2)) == (2, 0)
    assert (first.publish(slots, 1), first.publish(slots.of([1]), 1)) == (1, 1)
    assert second.which(["a", "b"]) == [True, True]


def test_numbers_that_are_no_slots_change_nothing(open_arena):
    arena = open_arena()
    slots, _ = arena.reserve(["a"], b"\0", [100])
    for wrong in (1 << 40, 4000, 70, slots.slots[0] + 1):
        made_up = slots.of([0])
        made_up.slots[0] = wrong
        assert (arena.publish(made_up, 1), arena.still_there(made_up, 1)) == (0, 0)
        arena.abandon(made_up)
    assert arena.publish(slots, 1) == 1


def test_a_closed_arena_gives_back_what_it_reserved(open_arena):
    first, second = open_arena(), open_arena()
    first.reserve(["a", "b", "c"], bytes(3), [100] * 3)
    assert second.counts()[:3] == (0, 3, 0)
    first.close()
    assert second.counts()[:3] == (0, 0, 3), "they rest: a device may still write to them"
    with pytest.raises(StoreClosed):
        first.match(["a"])


def test_a_forked_child_does_not_keep_its_parents_locks(open_arena):
    """A grandchild outlives the process that had reserved; others must see that one's death."""
    watcher = open_arena()
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        mine = open_arena()
        mine.reserve(["a"], b"\0", [100])
        if os.fork() == 0:
            os.write(to_parent[1], b"1")
            os.read(to_child[0], 1)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(to_parent[0], 1) == b"1"
    try:
        assert watcher.counts()[1:3] == (1, 0)
        _, covered = watcher.reserve([f"k{i}" for i in range(4)], bytes(4), [MIB] * 4)
        assert covered == 3
        assert watcher.counts()[1:3] == (3, 1), "its death was seen"
    finally:
        os.write(to_child[1], b"1")
        for end in (*to_child, *to_parent):
            os.close(end)


@pytest.mark.parametrize(
    ("size", "slab"), [(0, MIB), (MIB + 1, MIB), (MIB, 0), (MIB, 4095), (-MIB, MIB), (MIB, -MIB)]
)
def test_sizes_that_do_not_fit_are_refused(library, tmp_path, size, slab):
    fd = os.open(tmp_path / "arena", os.O_CREAT | os.O_RDWR, 0o600)
    with pytest.raises(ValueError, match="no arena has"):
        format_arena(library, fd, size, slab, seed=1)
    os.close(fd)
