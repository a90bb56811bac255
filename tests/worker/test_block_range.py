"""BlockRange: ranges are even, in order, and large enough."""

from __future__ import annotations

from pdstore.worker.values import Split


def test_ranges_are_even_and_in_order():
    assert Split(1).ranges(2, 12, 3) == [(2, 5), (5, 8), (8, 12)]
    assert Split(1).ranges(0, 2, 10) == [(0, 1), (1, 2)]


def test_few_bytes_are_one_range():
    assert Split(64).ranges(0, 100, 15) == [(0, 100)]
    assert len(Split(64).ranges(0, 100, 16)) == 2


def test_less_than_eight_whole_ranges_are_split_into_eight():
    assert len(Split(64).ranges(0, 100, 64)) == 8
    assert len(Split(64).ranges(0, 100, 8 * 64)) == 8
    assert len(Split(64).ranges(0, 100, 9 * 64)) == 9


def test_no_blocks_are_one_empty_range():
    assert Split().ranges(4, 4, 0) == [(4, 4)]


def test_the_library_spreads_a_range_itself():
    split = Split.native(64)
    assert split.ranges(0, 100, 127) == [(0, 100)]
    assert len(split.ranges(0, 100, 128)) == 2
    assert split.early_bytes < Split(64).early_bytes
