"""The replay of a trace finds what its shared prefixes are worth, by the trace's own time."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.trace.__main__ import main
from benchmarks.trace.replay import Clock, Fleet, replay
from benchmarks.trace.requests import TRACE_BLOCK, TraceRequest, read_trace


def conversations(num_requests=300, seed=1):
    """Requests in one of twenty conversations, each a turn longer than the one before."""
    chance, number = random.Random(seed), iter(range(1 << 30))
    talks = [[next(number)] for _ in range(20)]
    requests = []
    for i in range(num_requests):
        talk = chance.choice(talks)
        talk += [next(number) for _ in range(chance.randrange(1, 4))]
        requests.append(TraceRequest(2.0 * i, TRACE_BLOCK * len(talk), 100, list(talk)))
    return requests


def found_of(requests, lag_s=0.0):
    """The tokens of blocks that an earlier request had, and of all blocks."""
    stored, found, total = [], 0, 0
    for request in requests:
        seen = {block for at, blocks in stored if at <= request.at_s for block in blocks}
        run = 0
        while run < len(request.blocks) and request.blocks[run] in seen:
            run += 1
        found, total = found + run * TRACE_BLOCK, total + request.num_tokens
        stored.append((request.at_s + lag_s, request.blocks))
    return found, total


@pytest.mark.parametrize("lag_s", [0.0, 25.0])
def test_a_pool_without_bounds_finds_every_prefix_that_was_stored_by_then(lag_s):
    requests, clock = conversations(), Clock()
    fleet = Fleet(clock, 3, None, is_shared=True, lag_s=lag_s)
    assert replay(requests, [fleet], clock) == len(requests)
    assert (fleet.hits.num_found, fleet.hits.num_tokens) == found_of(requests, lag_s)
    fleet.close()


def test_the_command_reads_a_file_and_writes_its_rows(tmp_path, monkeypatch):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    line = {"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [0, 1]}
    trace.write_text("".join(json.dumps({**line, "timestamp": 1000 * n}) + "\n" for n in range(4)))
    monkeypatch.setattr("sys.argv", ["trace", str(trace), "--json", str(out), "--instances", "2"])
    main()
    rows = json.loads(out.read_text())["rows"]
    assert {row["tokens found, %"] for row in rows if row["publish lag, s"] == 0} <= {50.0, 75.0}


def test_a_line_that_is_no_request_is_named(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:1: no request"):
        list(read_trace(trace))
