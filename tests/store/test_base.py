"""The pieces of the contract that all stores share: slots, argument checks, lifecycle."""

from __future__ import annotations

import os

import pytest

from pdstore.errors import StoreClosed
from pdstore.format.keys import BlockKey
from pdstore.store import Lifecycle, Slots, check_call

KEYS = [BlockKey(f"pds1:key:{n}") for n in range(3)]


def slots_of(numbers, sizes, slot_bytes=16, num_slots=4):
    return Slots(memoryview(bytearray(slot_bytes * num_slots)), slot_bytes, numbers, sizes)


def test_a_slots_value_is_its_bytes_of_the_buffer():
    slots = slots_of([2, 0], [16, 3])
    slots.value(0)[:] = b"x" * 16
    slots.value(1)[:] = b"abc"
    assert bytes(slots.view) == b"abc" + bytes(29) + b"x" * 16 + bytes(16)


def test_a_part_has_the_slots_from_start_to_stop():
    part = slots_of([3, 1, 0], [5, 6, 7]).part(1, 3)
    assert (len(part), list(part.numbers), list(part.sizes)) == (2, [1, 0], [6, 7])


def test_distinct_keys_with_slots_inside_the_buffer_pass():
    check_call([])
    check_call(KEYS)
    check_call(KEYS, slots_of([3, 1, 0], [1, 16, 8]))
    check_call([BlockKey("k" * 200)])


@pytest.mark.parametrize(
    "key", ["", "k" * 201, "a/b", "../up", ".hidden", "with\nline", "\N{SNOWMAN}", "tab\t"]
)
def test_a_key_that_could_not_be_a_file_name_is_refused(key):
    with pytest.raises(ValueError, match="bad block key"):
        check_call([KEYS[0], BlockKey(key)])


def test_a_key_given_twice_is_refused():
    with pytest.raises(ValueError, match="distinct"):
        check_call([KEYS[0], KEYS[1], KEYS[0]])


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [
        ([0, 1], [1, 1, 1]),
        ([0, 1, 2], [1, 1]),
        ([0, 1, 4], [1, 1, 1]),
        ([0, 1, -1], [1, 1, 1]),
        ([0, 1, 2], [1, 1, 17]),
        ([0, 1, 2], [1, 1, 0]),
    ],
)
def test_slots_that_do_not_fit_the_keys_or_the_buffer_are_refused(numbers, sizes):
    with pytest.raises(ValueError, match=r"not as many|outside the buffer"):
        check_call(KEYS, slots_of(numbers, sizes))


def test_after_its_end_a_store_raises_and_only_the_first_end_cleans_up():
    lifecycle = Lifecycle("shelf://x")
    lifecycle.check()
    assert [lifecycle.end(), lifecycle.end()] == [True, False]
    with pytest.raises(StoreClosed, match="shelf://x is closed") as caught:
        lifecycle.check(num_done=2)
    assert caught.value.num_done == 2


def test_in_the_child_of_a_fork_a_store_is_closed_and_has_nothing_to_clean_up(monkeypatch):
    lifecycle = Lifecycle("shelf://x")
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert lifecycle.is_closed
    with pytest.raises(StoreClosed, match="open it again here"):
        lifecycle.check()
    assert not lifecycle.end()
