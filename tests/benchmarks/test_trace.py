"""The replay of a trace finds what its shared prefixes are worth, by the trace's own time."""

from __future__ import annotations

import json
import random
from collections import OrderedDict

import pytest

from benchmarks.trace import eviction, room, tiers
from benchmarks.trace.__main__ import main
from benchmarks.trace.closed_loop import LIVE_TOKENS, ClosedLoop, Crowd, Policy
from benchmarks.trace.replay import Clock, Fleet, replay
from benchmarks.trace.requests import TRACE_BLOCK, TraceRequest, read_trace
from tests.support.published_models import MODELS


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
    assert room.ReuseDistances(TRACE).hit_rate(size) == pytest.approx(played(size))


def test_the_pool_for_a_hit_rate_comes_from_a_trace(tmp_path, monkeypatch):
    trace, model, out = (tmp_path / name for name in ("trace.jsonl", "config.json", "out.json"))
    model.write_text(json.dumps(MODELS["Llama-3.1-8B"]))
    line = {"timestamp": 0, "input_length": 900, "output_length": 5}
    lines = [json.dumps({**line, "hash_ids": [0, n, 0]}) for n in range(1, 11)]
    trace.write_text("\n".join(lines))
    asked = ["room", str(trace), "--model", str(model), "--json", str(out), "--hit-rate"]
    for rate, tokens in (("0.6", 2 * TRACE_BLOCK), ("0.9", "none does")):
        monkeypatch.setattr("sys.argv", [*asked, rate])
        room.main()
        [row] = json.loads(out.read_text())["rows"]
        assert row["tokens"] == tokens
    monkeypatch.setattr("sys.argv", [*asked, "60"])
    with pytest.raises(SystemExit):
        room.main()


def share_found(requests, num_blocks, policy):
    return eviction.percentages(requests, num_blocks, policy)[0]


@pytest.mark.parametrize(("size", "least"), [(1 / 8, 19), (3 / 4, 60)])
def test_admission_finds_on_a_cycle_what_the_pool_holds(size, least):
    requests = eviction.cycle(32, turns=30)
    num_blocks = int(eviction.in_use(32, requests) * size)
    found = share_found(requests, num_blocks, eviction.PRODUCT)
    assert found > least
    assert found > 1.5 * share_found(requests, num_blocks, Policy())


def test_admission_finds_what_lru_finds_where_old_blocks_are_of_less_use():
    requests = [eviction.Asked(r.at_s, r.blocks) for r in conversations()]
    found = share_found(requests, 200, eviction.PRODUCT)
    assert found > share_found(requests, 200, Policy()) - 1


@pytest.mark.parametrize(("size", "least"), [(0.5, 30), (1.25, 65)])
def test_users_who_leave_find_what_the_pool_holds_though_they_queue(size, least):
    """A pool of 1.25 times their own KV also holds what those who left have left behind."""
    crowd, counts = Crowd(24, 4, is_mixed=True), []
    for policy in (Policy(), eviction.PRODUCT):
        loop = ClosedLoop(crowd, policy, int(size * 24 * LIVE_TOKENS), seed=101)
        loop.run(100.0)
        counts.append(loop.run(300.0))
    lru, product = (100 * each["loaded"] / each["asked"] for each in counts)
    assert product > least
    assert product > lru - 1
    assert counts[0]["refused"] == 0
    assert (counts[1]["refused"] > 0) == (size < 1)


@pytest.fixture(scope="module")
def in_turn():
    """Users who ask in turn, in a first tier of 1/4 and a lower tier of 3/4 of what they have."""
    requests = eviction.cycle(32, turns=30)
    num_blocks = eviction.in_use(32, requests)
    return {
        name: tiers.percentages(tiers.played(requests, num_blocks, (1 / 4, 3 / 4), policy))
        for name, policy in tiers.POLICIES.items()
    }


@pytest.mark.parametrize("policy", ["last", "product", "hand-offs", "unused below"])
def test_two_tiers_find_what_they_hold_together_and_write_little(in_turn, policy):
    found, above, below, down, *_ = in_turn[policy]
    assert found == pytest.approx(above + below, abs=0.2)
    assert found > 60
    assert found > 1.5 * in_turn["LRU"][0]
    assert down < 0.4 * in_turn["LRU"][3]


def test_a_use_in_the_lower_tier_too_saves_writes(in_turn):
    assert in_turn["product"][3] < 0.8 * in_turn["unused below"][3]
    assert in_turn["product"][3] < 20


def test_what_is_not_worth_it_is_not_copied_up(in_turn):
    assert in_turn["last"][4] > 50
    assert in_turn["product"][4] < 2
    assert in_turn["product"][1] > in_turn["last"][1], "the first tier keeps what it has"


def test_a_first_tier_that_takes_all_is_an_lru_cache():
    """What is copied up, saved and used there is all that a pool of one tier stores and uses."""
    requests = [eviction.Asked(r.at_s, r.blocks) for r in conversations()]
    counts = tiers.played(requests, 400, (1 / 4, 1.0), tiers.POLICIES["LRU"])
    alone = eviction.percentages(requests, 100, Policy(None, knows_queue=True))[0]
    assert 100 * counts["above"] / counts["asked"] == pytest.approx(alone, abs=2)
    assert counts["below"] > 0
    assert counts["refused"] == 0
    assert counts["down"] <= counts["asked"] - counts["above"] - counts["below"]


def test_the_command_of_tiers_writes_a_row_for_each_policy(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(tiers, "SIZES", [(1 / 4, 3 / 4)])
    monkeypatch.setattr("sys.argv", ["tiers", "--users", "2", "--json", str(out)])
    tiers.main()
    rows = json.loads(out.read_text())["rows"]
    assert {row["policy"] for row in rows if row["lower tier"]} == set(tiers.POLICIES)
    assert all(0 <= row["found, %"] <= 100 for row in rows)
