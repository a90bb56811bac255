"""Places of an arena: which of a call's values got one, and whose they are."""

from __future__ import annotations

import pytest

from pdstore.native.arena import SlotArrays
from pdstore.store.arena.places import check_sizes, lent_here, reservation_of, reserved_here
from pdstore.store.in_place import Loan, Places, Reservation
from pdstore.testing.values import fresh_keys

NOTHING = Places(memoryview(b""), [], [])


def arrays_of(slots):
    arrays = SlotArrays(len(slots))
    arrays.slots[:] = slots
    arrays.offsets[:] = [4096 * (i + 1) for i in range(len(slots))]
    return arrays


@pytest.mark.parametrize(
    ("slots", "covered", "missing"),
    [([5, 6, 7], 3, [0, 1, 2]), ([5, -1, 7], 3, [0, 2]), ([-1, -1], 2, []), ([5, 6, -1], 1, [0])],
)
def test_a_reservation_has_the_places_of_what_is_not_stored(slots, covered, missing):
    sizes = [100 + i for i in range(len(slots))]
    reservation = reservation_of(memoryview(b""), arrays_of(slots), covered, sizes)
    assert (reservation.num_keys, list(reservation.missing)) == (covered, missing)
    assert list(reservation.places.offsets) == [4096 * (i + 1) for i in missing]
    assert list(reservation.places.sizes) == [sizes[i] for i in missing]
    assert list(reserved_here(reservation, len(missing)).slots) == [slots[i] for i in missing]


def test_a_count_that_a_reservation_has_not_is_refused():
    reservation = reservation_of(memoryview(b""), arrays_of([5]), 1, [100])
    for count in (-1, 2):
        with pytest.raises(ValueError, match="count"):
            reserved_here(reservation, count)


def test_what_another_store_gave_is_refused():
    with pytest.raises(ValueError, match="reservation"):
        reserved_here(Reservation(0, [], NOTHING), 0)
    with pytest.raises(ValueError, match="loan"):
        lent_here(Loan(NOTHING))


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], [1, 0], [-5, 1]])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes"):
        check_sizes(fresh_keys(2), sizes)
