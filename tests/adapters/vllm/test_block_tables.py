"""RequestTables: what vLLM says that it holds, or what an older one says that it adds."""

from __future__ import annotations

from types import SimpleNamespace

from pdstore.adapters.vllm.block_tables import RequestTables, pool_tables
from pdstore.format.layout import NO_BLOCK


def step(new=(), cached=(), resumed=()):
    """A step of a vLLM that says what it adds: pairs of a request and its new blocks."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=id, block_ids=ids) for id, ids in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[id for id, _ in cached],
            new_block_ids=[ids for _, ids in cached],
            resumed_req_ids=set(resumed),
        ),
    )


def test_a_vllm_that_says_what_it_holds_is_asked_each_time():
    held = {"a": ([1, 2], [3])}
    tables = RequestTables()
    tables.step(SimpleNamespace(kv_connector_block_state=SimpleNamespace(get_block_ids=held.get)))
    assert tables.of("a") == ([1, 2], [3])
    held["a"] = ([1, 2, 9], [0, 4])
    assert tables.of("a") == ([1, 2, 9], [0, 4])
    assert tables.of("b") is None


def test_what_an_older_vllm_adds_is_appended():
    tables = RequestTables()
    tables.step(step(new=[("a", ([1, 2],))]))
    tables.step(step(cached=[("a", ([3],))]))
    tables.step(step(cached=[("a", None)]))
    assert tables.of("a") == [[1, 2, 3]]


def test_a_preempted_request_comes_back_with_other_blocks():
    tables = RequestTables()
    tables.step(step(new=[("a", ([1, 2],))]))
    tables.step(step(cached=[("a", ([7, 8, 9],))], resumed=["a"]))
    assert tables.of("a") == [[7, 8, 9]]


def test_vllms_own_lists_are_not_kept():
    given = [1, 2]
    tables = RequestTables()
    tables.step(step(new=[("a", (given,))]))
    tables.step(step(cached=[("a", ([3],))]))
    assert given == [1, 2]


def test_a_request_that_has_ended_is_forgotten():
    tables = RequestTables()
    tables.step(step(new=[("a", ([1],))]))
    tables.forget("a")
    tables.forget("never seen")
    assert tables.of("a") is None


def test_blocks_that_a_window_has_left_are_no_blocks():
    assert pool_tables(([0, 0, 5, 6], [1, 2, 3, 4]), 3) == [[NO_BLOCK, NO_BLOCK, 5], [1, 2, 3]]
