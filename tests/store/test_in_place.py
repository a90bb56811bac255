"""InPlace: what reservations and loans count, and where the bytes of a value lie."""

from __future__ import annotations

import pytest

from pdstore.store.in_place import InPlace, Loan, Places, Reservation
from pdstore.store.memory import MemoryStore


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(3 * 4096))


@pytest.fixture
def places(memory) -> Places:
    """The second value lies before the first one: offsets need not ascend."""
    return Places(memory, [8192, 0], [100, 5000])


def test_a_value_is_its_own_bytes_of_the_memory_and_no_copy(places, memory):
    places.value(0)[:] = b"a" * 100
    places.value(1)[:] = b"b" * 5000
    assert bytes(memory[:5000]) == b"b" * 5000
    assert bytes(memory[8192:8292]) == b"a" * 100
    assert not any(memory[5000:8192])
    assert not any(memory[8292:])


def test_a_reservation_counts_its_places_and_not_the_keys_that_it_covers(places):
    reservation = Reservation(5, [1, 4], places)
    assert (len(reservation), reservation.num_keys) == (2, 5)
    assert not Reservation(3, [], Places(places.view, [], []))


def test_a_loan_counts_the_values_that_were_found(places):
    assert len(Loan(places)) == 2
    assert not Loan(Places(places.view, [], []))


def test_a_store_without_memory_of_its_own_does_not_offer_it():
    assert not isinstance(MemoryStore(), InPlace)
