"""Which values must not be used, and why."""

from __future__ import annotations

from pdstore.format import block
from pdstore.outcome import Reason
from pdstore.worker.block_range import BlockRange
from pdstore.worker.verified import wrong_values
from tests.support.values_kit import prompt_of


def test_damaged_values_and_those_of_other_keys_are_wrong():
    prompt = prompt_of()
    values = list(prompt.values(BlockRange(0, len(prompt.keys))))
    stored = [memoryview(bytearray(value.size)) for value in values]
    for value, view in zip(values, stored, strict=True):
        block.seal(view, value.header)
    stored[1][block.HEADER_BYTES] ^= 1
    stored[2][:] = stored[0]
    sums = [block.checksum(view) for view in stored]
    found = wrong_values(values, lambda i: stored[i], sums)
    assert found == {1: Reason.CORRUPT, 2: Reason.FOREIGN}
