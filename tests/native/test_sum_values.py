"""Checksums by the native library: those of `block.checksum`, for many values in one call."""

from __future__ import annotations

import random

import pytest

from pdstore.format.block import HEADER_BYTES, checksum
from pdstore.native.library import address_of


def test_the_sums_of_many_values_are_those_of_each(library):
    chance = random.Random(0)
    sizes = [HEADER_BYTES, HEADER_BYTES + 1, 4096, 240, 241, 1 << 20, (1 << 20) + 7]
    values = [memoryview(bytearray(chance.randbytes(size))) for size in sizes]
    sums = library.sum_values([address_of(value) for value in values], sizes)
    assert sums == [checksum(value) for value in values]


def test_a_sum_leaves_out_its_own_bytes_and_nothing_else(library):
    value = memoryview(bytearray(200))
    before = library.sum_values([address_of(value)], [200])
    for place in range(200):
        value[place] ^= 1
        same = library.sum_values([address_of(value)], [200]) == before
        value[place] ^= 1
        assert same == (HEADER_BYTES - 8 <= place < HEADER_BYTES)


def test_no_values_have_no_sums(library):
    assert library.sum_values([], []) == []


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_a_value_without_a_header_is_refused(library, size):
    value = memoryview(bytearray(HEADER_BYTES))
    with pytest.raises(ValueError, match="header"):
        library.sum_values([address_of(value)], [size])
