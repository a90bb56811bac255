"""Reuse distances agree with an LRU cache that is played through."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from pdstore.cli.reuse import ReuseDistances, read_trace
from pdstore.errors import ConfigError

TRACE = [[random.Random(i).randrange(30) for _ in range(5)] for i in range(60)]


def played(size):
    kept, hits = OrderedDict(), 0
    for block in (block for request in TRACE for block in request):
        hits += block in kept
        kept.pop(block, None)
        kept[block] = True
        if len(kept) > size:
            kept.popitem(last=False)
    return hits / 300


@pytest.mark.parametrize("size", [1, 2, 5, 13, 29, 30, 100])
def test_hit_rates_are_those_of_an_lru_cache(size):
    assert ReuseDistances(TRACE).hit_rate(size) == pytest.approx(played(size))


def test_the_least_room_for_a_hit_rate_is_just_enough():
    reuse = ReuseDistances(TRACE)
    for rate in (0.1, 0.5, reuse.best):
        blocks = reuse.blocks_for(rate)
        assert played(blocks) >= rate > played(blocks - 1)
    assert reuse.blocks_for(reuse.best + 0.01) is None


def test_a_trace_is_read_and_nonsense_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "hash_ids": [0, 1]}\n{"hash_ids": [0]}\n')
    assert read_trace(str(path)) == [[0, 1], [0]]
    for nonsense in ("{}", "[]", '{"hash_ids": 5}', '{"hash_ids": [[1]]}', "not JSON"):
        path.write_text(nonsense)
        with pytest.raises(ConfigError, match="no trace"):
            read_trace(str(path))
    with pytest.raises(ConfigError, match=r"cannot read the trace .*: No such file"):
        read_trace(str(tmp_path / "none"))
