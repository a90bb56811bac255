"""Values of an arena where they lie: reserved, published, borrowed, and gone under a reader."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreClosed, StoreFull, WrongLength
from pdstore.metrics import Metrics
from pdstore.store.in_place import InPlace
from pdstore.store.optional import find_optional
from pdstore.store.wrappers import CircuitBreaker, Instrumented
from pdstore.testing import content, fresh_keys
from pdstore.testing.values import get, put

MIB = 1 << 20
SIZE = 64 << 10


@pytest.fixture
def store(open_arena):
    return open_arena(size=4 * MIB, slab_bytes=MIB, fresh_s=0)


def reserve_and_fill(store, keys, size=SIZE):
    reservation = store.reserve(keys, [size] * len(keys))
    for place, i in enumerate(reservation.missing):
        reservation.places.value(place)[:] = content(keys[i], size)
    return reservation


def test_what_is_published_can_be_got(store):
    keys = fresh_keys(5)
    reservation = reserve_and_fill(store, keys)
    assert (reservation.num_keys, list(reservation.missing)) == (5, [0, 1, 2, 3, 4])
    assert store.match(keys) == 0, "nobody finds what is not published"
    assert store.publish(reservation, 5) == 5
    assert get(store, keys, [SIZE] * 5) == [content(key, SIZE) for key in keys]


def test_what_was_put_can_be_borrowed(store):
    keys = fresh_keys(3)
    values = [content(key, SIZE) for key in keys]
    put(store, keys[:2], values[:2])
    loan = store.borrow(keys, [SIZE] * 3)
    assert len(loan) == 2
    assert [bytes(loan.places.value(i)) for i in range(2)] == values[:2]
    assert store.still_there(loan) == 2
    store.release(loan)


def test_a_reservation_leaves_out_what_is_stored(store):
    keys = fresh_keys(4)
    put(store, keys[1:3], [b"x" * SIZE] * 2)
    reservation = reserve_and_fill(store, keys)
    assert (reservation.num_keys, list(reservation.missing)) == (4, [0, 3])
    assert store.publish(reservation, 2) == 2
    assert get(store, keys[1:2], [SIZE]) == [b"x" * SIZE]
    assert store.match(keys) == 4


def test_values_can_be_published_one_after_the_other(store):
    keys = fresh_keys(4)
    reservation = reserve_and_fill(store, keys)
    for count in (1, 1, 3, 4, 4):
        assert store.publish(reservation, count) == count
        assert store.match(keys) == count


def test_what_is_abandoned_leaves_its_room(store):
    for _ in range(20):
        reservation = reserve_and_fill(store, fresh_keys(30))
        store.publish(reservation, 2)
        store.abandon(reservation)
        store.abandon(reservation)
    assert store.counts().reserved == 0


def test_the_second_writer_of_a_key_gives_its_place_back(store, open_arena):
    keys, peer = fresh_keys(2), open_arena()
    first, second = reserve_and_fill(store, keys), peer.reserve(keys, [SIZE] * 2)
    for i in range(2):
        second.places.value(i)[:] = b"y" * SIZE
    assert (store.publish(first, 2), peer.publish(second, 2)) == (2, 2)
    assert get(peer, keys, [SIZE] * 2) == [content(key, SIZE) for key in keys]
    assert store.counts()[:2] == (2, 0)


def test_reservations_are_never_evicted_and_full_is_said(store):
    reservation = reserve_and_fill(store, fresh_keys(100))
    assert reservation.num_keys == 64
    with pytest.raises(StoreFull):
        store.reserve(fresh_keys(1), [SIZE])
    store.abandon(reservation)
    assert len(store.reserve(fresh_keys(1), [SIZE])) == 1


def test_a_value_larger_than_a_slab_is_store_full(store):
    with pytest.raises(StoreFull):
        store.reserve(fresh_keys(1), [MIB + 1])
    assert len(store.reserve(fresh_keys(1), [MIB])) == 1


def test_no_value_lies_in_two_spans(store):
    reservation = store.reserve(fresh_keys(8), [300_000] * 8)
    for offset, size in zip(reservation.places.offsets, reservation.places.sizes, strict=True):
        assert offset % 4096 == 0
        assert offset // store.span_bytes == (offset + size - 1) // store.span_bytes


@pytest.mark.parametrize("gone", range(3))
def test_a_value_that_goes_under_its_reader_does_not_count(store, gone):
    keys = fresh_keys(3)
    put(store, keys, [content(key, SIZE) for key in keys])
    loan = store.borrow(keys, [SIZE] * 3)
    store.remove([keys[gone]])
    assert store.still_there(loan) == gone
    put(store, [keys[gone]], [content(keys[gone], SIZE)])
    assert store.still_there(loan) == gone, "the same key again is another value"


def test_borrowed_values_are_leased(store):
    keys = fresh_keys(64)
    put(store, keys, [content(key, SIZE) for key in keys])
    loan = store.borrow(keys[:3], [SIZE] * 3)
    put(store, fresh_keys(40), [b"x" * SIZE] * 40)
    assert store.still_there(loan) == 3


def test_a_value_of_another_length_is_not_lent(store):
    keys = fresh_keys(3)
    put(store, keys, [content(key, SIZE) for key in keys])
    with pytest.raises(WrongLength) as caught:
        store.borrow(keys, [SIZE, SIZE - 1, SIZE])
    assert caught.value.num_done == 1


def test_views_outlive_a_closed_store(store):
    keys = fresh_keys(1)
    put(store, keys, [content(keys[0], SIZE)])
    loan = store.borrow(keys, [SIZE])
    store.close()
    assert bytes(loan.places.value(0)) == content(keys[0], SIZE)
    for call in (lambda: store.still_there(loan), lambda: store.borrow(keys, [SIZE]), store.memory):
        with pytest.raises(StoreClosed):
            call()


@pytest.mark.parametrize(("keys", "sizes"), [(1, [1, 2]), (2, [1, 0]), (1, [-1]), (0, [1])])
def test_sizes_that_do_not_fit_are_refused(store, keys, sizes):
    for call in (store.reserve, store.borrow):
        with pytest.raises(ValueError, match="size"):
            call(fresh_keys(keys), sizes)


def test_an_empty_batch_is_nothing(store):
    reservation, loan = store.reserve([], []), store.borrow([], [])
    assert (reservation.num_keys, len(reservation), len(loan)) == (0, 0, 0)
    assert (store.publish(reservation, 0), store.still_there(loan)) == (0, 0)
    store.abandon(reservation)


def test_it_is_found_through_wrappers_that_count_its_bytes(store):
    metrics, keys = Metrics(), fresh_keys(3)
    in_place = find_optional(CircuitBreaker(Instrumented(store, metrics)), InPlace)
    assert isinstance(in_place, InPlace)
    assert (in_place.span_bytes, len(in_place.memory())) == (MIB, 4 * MIB)
    reservation = reserve_and_fill(in_place, keys)
    assert in_place.publish(reservation, 3) == 3
    in_place.abandon(reservation)
    assert len(in_place.borrow(keys, [SIZE] * 3)) == 3
    value = metrics.registry.get_sample_value
    for direction in ("save", "load"):
        assert value("pdstore_bytes_total", {"direction": direction}) == 3 * SIZE
