"""Survey: values are counted by namespace, the largest first."""

from __future__ import annotations

from pdstore.cli.survey import survey
from pdstore.format.keys import POOL_ID_KEY, BlockKey, Kind
from pdstore.format.namespace import Part
from pdstore.store.optional import StoredValue

A, B = "a" * 32, "b" * 32


def test_values_are_counted_by_namespace():
    values = [
        StoredValue(BlockKey(f"pds1:{A}:0:0:{'1' * 32}"), 100, 5.0),
        StoredValue(BlockKey(f"pds1:{B}:1:3:{'2' * 32}"), 300, None),
        StoredValue(BlockKey(f"pds1:{A}:0:1:{'1' * 32}:partial:9"), 50, 2.0),
        StoredValue(BlockKey(f"pds1:{A}:handoff:{'3' * 32}:0:done"), 64, 9.0),
        StoredValue(POOL_ID_KEY, 64, 1.0),
        StoredValue(BlockKey("pds1:doctor:00"), 64, 1.0),
    ]
    first, second = survey(values)
    assert (first.hex, first.num_bytes, first.youngest_s, first.oldest_s) == (B, 300, None, None)
    assert (second.hex, second.num_values, second.num_bytes) == (A, 3, 214)
    assert (second.youngest_s, second.oldest_s) == (2.0, 9.0)
    assert second.counts == {Kind.BLOCK: 1, Kind.TAIL: 1, Kind.HANDOFF: 1, Kind.POOL: 0}
    assert second.parts == {Part(0, 0), Part(0, 1)}
    assert second.sample == values[0]
