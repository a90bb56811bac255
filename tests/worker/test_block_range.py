"""BlockRange: ranges are even, in order, and large enough."""

from __future__ import annotations

from pdstore.worker.block_range import ranges_of


def test_ranges_are_even_and_in_order():
    assert ranges_of(2, 12, 3, range_bytes=1) == [(2, 5), (5, 8), (8, 12)]
    assert ranges_of(0, 2, 10, range_bytes=1) == [(0, 1), (1, 2)]


def test_few_bytes_are_one_range():
    assert ranges_of(0, 100, 15, range_bytes=64) == [(0, 100)]
    assert len(ranges_of(0, 100, 16, range_bytes=64)) == 2


def test_less_than_eight_whole_ranges_are_split_into_eight():
    assert len(ranges_of(0, 100, 64, range_bytes=64)) == 8
    assert len(ranges_of(0, 100, 8 * 64, range_bytes=64)) == 8
    assert len(ranges_of(0, 100, 9 * 64, range_bytes=64)) == 9


def test_no_blocks_are_one_empty_range():
    assert ranges_of(4, 4, 0) == [(4, 4)]
